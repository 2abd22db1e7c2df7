// Beside each claim a button that shows its address and how to cite it; LOWPREC is of
// lowprec/publish/book.py, the addresses are of lowprec/publish/addresses.py.
const addressOf = id =>
  new URL(`${document.documentElement.dataset.content_root}claim/${id}.html`, location.href);

function copyButton(label, text) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = label;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  });
  return button;
}

function citation(id) {
  const address = addressOf(id).href;
  const said = `${LOWPREC.author}: ${LOWPREC.title}, version ${LOWPREC.version}, claim ${id}. `;
  const link = document.createElement("a");
  link.href = link.textContent = address;
  const line = document.createElement("div");
  line.className = "lowprec-citation";
  line.append(said, link);
  if (navigator.clipboard) {  // only there on https and on one's own machine
    line.append(" ", copyButton("Copy link", address), " ");
    line.append(copyButton("Copy citation", said + address));
  }
  return line;
}

function offer(id, paragraph) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "lowprec-cite";
  button.textContent = "Cite";
  button.setAttribute("aria-expanded", "false");
  button.setAttribute("aria-label", `Link to the claim ${id}, and how to cite it`);
  let line;
  button.addEventListener("click", () => {
    if (!line) paragraph.after(line = citation(id));
    line.hidden = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!line.hidden));
  });
  paragraph.append(" ", button);
}

document.addEventListener("DOMContentLoaded", () => {
  for (const claim of document.querySelectorAll(".bd-article [id^=claim-]")) {
    const own = [...claim.children].filter(e => e.matches("p:not(.admonition-title)"));
    offer(claim.id.slice("claim-".length), claim.matches("p") ? claim : own.at(-1));
  }
  for (const link of document.querySelectorAll(".bd-article li > p > a[href*='#claim-']")) {
    if (link === link.parentElement.firstChild) {  // an item of a list of claims
      offer(link.hash.slice("#claim-".length), link.parentElement);
    }
  }
  const asked = location.hash.match(/^#(claim-(.+))$/);
  if (asked && !document.getElementById(asked[1])) {  // it has moved to another page
    fetch(addressOf(asked[2])).then(found => found.ok && location.replace(found.url));
  }
});
