// The short definition of a term or symbol where the text links it to the glossary: on hover, on
// keyboard focus, on the first tap. DEFINITIONS is written by lowprec/publish/terms.py.
document.addEventListener("DOMContentLoaded", () => {
  if (typeof DEFINITIONS === "undefined") return;
  const tip = document.createElement("div");
  tip.id = tip.className = "lowprec-tip";
  tip.setAttribute("role", "tooltip");
  tip.hidden = true;
  document.body.append(tip);
  let shown = null, closing;

  function hide() {
    clearTimeout(closing);
    shown?.removeAttribute("aria-describedby");
    shown = null;
    tip.hidden = true;
  }

  function hideSoon() {  // there is time to move onto the definition
    clearTimeout(closing);
    closing = setTimeout(hide, 200);
  }

  function show(link) {
    clearTimeout(closing);
    if (shown === link) return;
    hide();
    shown = link;
    const [term, text] = DEFINITIONS[link.hash.slice(1)], name = document.createElement("strong");
    name.textContent = term;
    tip.replaceChildren(name, ` ${text}`);
    tip.hidden = false;
    link.setAttribute("aria-describedby", tip.id);
    place(link.getClientRects()[0]);
  }

  function place(at) {  // below the word, above it where there is no room
    const gap = 6, width = document.documentElement.clientWidth - tip.offsetWidth - gap;
    const over = at.top - gap - tip.offsetHeight, under = at.bottom + gap;
    const above = under + tip.offsetHeight > innerHeight && over > 0;
    tip.style.left = `${scrollX + Math.max(gap, Math.min(at.left, width))}px`;
    tip.style.top = `${scrollY + (above ? over : under)}px`;
  }

  for (const link of document.querySelectorAll(".bd-article a.reference[href*='#term-']")) {
    if (!DEFINITIONS[link.hash.slice(1)]) continue;
    link.classList.add("lowprec-term");
    let wasOpen = true;
    link.addEventListener("pointerenter", e => e.pointerType === "mouse" && show(link));
    link.addEventListener("pointerleave", e => e.pointerType === "mouse" && hideSoon());
    link.addEventListener("pointerdown", e => {
      wasOpen = e.pointerType === "mouse" || shown === link;
    });
    link.addEventListener("focus", () => show(link));
    link.addEventListener("blur", hide);
    link.addEventListener("click", e => {
      if (!wasOpen) e.preventDefault();  // the second tap follows the link
      wasOpen = true;
    });
  }
  tip.addEventListener("pointerenter", () => clearTimeout(closing));
  tip.addEventListener("pointerleave", hideSoon);
  document.addEventListener("keydown", e => e.key === "Escape" && hide());
  document.addEventListener("pointerdown", e => {
    if (shown && !shown.contains(e.target) && !tip.contains(e.target)) hide();
  });
});
