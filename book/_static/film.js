// Maps that a slider takes from step to step; what they show stands in the figure as JSON, see
// lowprec/publish/film.py. Without a script, and in print, the figure shows some steps at rest.
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const CELL = { width: 46, height: 30, left: 52, top: 4 };

  function svgElement(parent, kind, attributes, text = "") {
    const element = document.createElementNS(SVG, kind);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return parent.appendChild(element);
  }

  // The map of a panel, its cells empty; returns what paints those of a step.
  function drawMap(parent, panel, film) {
    const { width, height, left, top } = CELL, under = top + height * film.rows.length;
    const box = document.createElement("div"), title = document.createElement("div");
    title.textContent = panel.title;
    box.append(title);
    parent.append(box);
    const size = [left + width * film.columns.length, under + 34];
    const svg = svgElement(box, "svg", { viewBox: `0 0 ${size.join(" ")}`, role: "img" });
    const put = (text, x, y, anchor = "middle") => svgElement(
      svg, "text", { x, y, "text-anchor": anchor, "dominant-baseline": "central" }, text);
    film.rows.forEach((name, i) => put(name, left - 6, top + height * (i + 0.5), "end"));
    film.columns.forEach((name, j) => put(name, left + width * (j + 0.5), under + 10));
    put(film.across, left + (width * film.columns.length) / 2, under + 26);
    const cells = panel.texts[0].map((_, k) => {
      const i = Math.floor(k / film.columns.length), j = k % film.columns.length;
      const x = left + width * j, y = top + height * i;
      const rect = svgElement(svg, "rect", { x, y, width: width - 1, height: height - 1 });
      return [rect, put("", x + width / 2, y + height / 2)];
    });
    return n => {
      cells.forEach(([rect, text], k) => {
        const [fill, ink] = film.colours[panel.shades[n][k]];
        rect.setAttribute("fill", fill);
        text.setAttribute("fill", ink);
        text.textContent = panel.texts[n][k];
      });
      const most = panel.texts[n].reduce((a, b, k, all) => (+b > +all[a] ? k : a), 0);
      const place = [Math.floor(most / film.columns.length), most % film.columns.length];
      const said = `${panel.title}: largest ${panel.texts[n][most]}, ${film.rows[place[0]]}, ` +
        `${film.across} ${film.columns[place[1]]}`;
      svg.setAttribute("aria-label", `${film.label}. ${said}`);
      return said;
    };
  }

  function drawFilm(frame) {
    const film = JSON.parse(frame.querySelector("script").textContent);
    const label = document.createElement("label"), slider = document.createElement("input");
    const shown = document.createElement("output"), maps = document.createElement("div");
    Object.assign(slider, { type: "range", min: 0, max: film.steps.length - 1, step: 1 });
    slider.value = slider.max;
    label.append("Step ", shown, slider);
    maps.className = "lowprec-maps";
    frame.append(label, maps);
    const paint = film.panels.map(panel => drawMap(maps, panel, film));
    const scale = document.createElement("div"), bar = document.createElement("span");
    scale.className = "lowprec-scale";
    bar.style.background = `linear-gradient(to right, ${film.colours.map(c => c[0]).join(", ")})`;
    scale.append(`${film.label} `, film.ends[0], bar, film.ends[1]);
    frame.append(scale);
    const show = () => {
      const step = film.steps[slider.value].toLocaleString("en");
      shown.textContent = step;
      slider.setAttribute("aria-valuetext",
        [`step ${step}`, ...paint.map(to => to(+slider.value))].join("; "));
    };
    slider.addEventListener("input", show);
    show();
    frame.closest("figure").classList.add("lowprec-moves");
  }

  document.addEventListener("DOMContentLoaded", () =>
    document.querySelectorAll(".lowprec-film").forEach(drawFilm));
})();
