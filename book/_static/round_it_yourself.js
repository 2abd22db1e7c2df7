// The two toys of the page "Round it yourself", without a library. First the arithmetic, pure
// functions on window.lowprecToy that tests/test_toy.py compares with lowprec bit for bit; then the
// first toy, two terms and a small rest; then the second, a row of four keys. A toy takes the place
// of the static example that the page has for readers without JavaScript.
(() => {

// ---- Arithmetic: BF16, as in lowprec/numerics/formats.py ----

const EMIN = -126, EMAX = 127, STORED = 7;  // exponents of normal numbers; stored significand bits
const MAX = (2 - 2 ** -STORED) * 2 ** EMAX;
const view = new DataView(new ArrayBuffer(8));

// An ulp: the distance between BF16 numbers at x.
function ulp(x) {
  view.setFloat64(0, Math.abs(x));
  const exponent = (view.getUint16(0) >> 4) - 1023;
  return 2 ** (Math.min(Math.max(exponent, EMIN), EMAX) - STORED);
}

// The nearest integer, halfway the even one, for x from 0 to 2^52: a double has no bits to spare.
const toEven = x => x + 2 ** 52 - 2 ** 52;

// x as a BF16 number. mode: nearest_even, toward_zero or stochastic; word: for the last, a random
// integer below 2^32, which is added to the bits that are cut.
function roundTo(x, mode, word) {
  const scaled = Math.abs(x) / ulp(x);
  let integer = mode === "nearest_even" ? toEven(scaled) : Math.floor(scaled);
  if (mode === "stochastic") {
    integer += toEven((scaled - integer) * 2 ** 32) + word >= 2 ** 32 ? 1 : 0;
  }
  let result = integer * ulp(x);
  if (result > MAX) result = mode === "toward_zero" && Number.isFinite(x) ? MAX : Infinity;
  return x < 0 || Object.is(x, -0) ? -result : result;
}

// The 32 bits of an FP32 number. Its first 16 are those of BF16: the rest is what rounding looks at.
function bits(x) {
  view.setFloat32(0, x);
  const all = view.getUint32(0).toString(2).padStart(32, "0");
  return {
    sign: all[0], exponent: all.slice(1, 9), kept: all.slice(9, 16),
    round: all[16], sticky: all.slice(17),
  };
}

// The rest of a sum, as an FP32 number; size: in ulp of the sum of the terms.
const restOf = (first, second, size) => Math.fround(size * ulp(first + second));

// A sum as exact arithmetic has it, and as FP32 adds it up.
function add(first, second, rest) {
  return { exact: first + second + rest, fp32: Math.fround(Math.fround(first + second) + rest) };
}

// The signed error of a rounded sum, in ulp of the exact one.
const errorOf = (sum, rounded) => (rounded - sum.exact) / ulp(sum.exact);

// Random words by the generator mulberry32.
function generator(seed) {
  return () => {
    seed = seed + 0x6d2b79f5 | 0;
    let t = Math.imul(seed ^ seed >>> 15, seed | 1);
    t ^= t + Math.imul(t ^ t >>> 7, t | 61);
    return (t ^ t >>> 14) >>> 0;
  };
}

// The error of one random sum: two of the 128 BF16 numbers from 2 to below 4, and the rest.
function draw(size, mode, eitherSign, word) {
  const first = 2 + (word() >>> 25) / 64, second = 2 + (word() >>> 25) / 64;
  const sign = eitherSign && word() < 2 ** 31 ? -1 : 1;
  const sum = add(first, second, restOf(first, second, sign * size));
  return errorOf(sum, roundTo(sum.fp32, mode, word()));
}

// The mean error of all 128 x 128 such sums. A stochastic rounding is right on average.
function meanOfAllPairs(size, mode, eitherSign) {
  let total = 0;
  const signs = eitherSign ? [1, -1] : [1];
  for (const sign of signs) for (let i = 0; i < 128; i++) for (let j = 0; j < 128; j++) {
    const first = 2 + i / 64, second = 2 + j / 64;
    const sum = add(first, second, restOf(first, second, sign * size));
    total += errorOf(sum, mode === "stochastic" ? sum.fp32 : roundTo(sum.fp32, mode));
  }
  return total / (signs.length * 128 * 128);
}

// One query's row of attention, backward. Its weights P and their gradients dP are given.
const ROW = {
  weights: [0.375, 0.25, 0.25, 0.125], dp: [2, 1.25, 0.5, 1.5], common: [3, 4],
  own: [[0.75, -0.5], [0.25, 0.5], [-0.75, 0.5], [-0.25, -0.5]],
};
const combine = (factors, vectors) =>
  [0, 1].map(d => vectors.reduce((total, v, j) => total + factors[j] * v[d], 0));
const length = v => Math.hypot(...v);

// off: error of δ as a share of δ; centred: share of the mean key taken from all keys; angle: by
// which a key turns from place to place, in degrees; fix: what becomes of the row sum, as the field
// row_sum of lowprec's policies. The scale of the scores is 1.
function row({ off, centred, angle, fix }) {
  const { weights, dp, common, own } = ROW;
  const turned = own.map(([x, y], place) => {
    const a = place * angle * Math.PI / 180, [u, v] = [x + common[0], y + common[1]];
    return [u * Math.cos(a) - v * Math.sin(a), u * Math.sin(a) + v * Math.cos(a)];
  });
  const mean = combine([0.25, 0.25, 0.25, 0.25], turned);
  const keys = turned.map(k => k.map((x, d) => x - centred * mean[d]));
  const left = combine([0.25, 0.25, 0.25, 0.25], keys), weighted = combine(weights, keys);
  const delta = weights.reduce((total, p, j) => total + p * dp[j], 0);
  const ds = weights.map((p, j) => p * (dp[j] - delta * (1 + off)));
  const rowSum = ds.reduce((total, x) => total + x, 0);
  const c = { as_rounded: [0, 0], removed: left, refined: weighted }[fix];
  const dq = combine(ds, keys).map((x, d) => x - rowSum * c[d]);
  const exact = combine(weights.map((p, j) => p * (dp[j] - delta)), keys);
  const error = length(dq.map((x, d) => x - exact[d])) / length(exact);
  return { keys, weighted, delta, ds, rowSum, dq, exact, error };
}

window.lowprecToy = {
  ulp, roundTo, bits, restOf, add, errorOf, generator, draw, meanOfAllPairs, ROW, row,
};

// ---- What both toys are made of ----

const minus = text => String(text).replace(/-/g, "\u2212");
const signed = (x, digits) => {
  const text = Math.abs(x).toFixed(digits);
  return (Number(text) === 0 ? "" : x < 0 ? "\u2212" : "+") + (Number.isFinite(x) ? text : "∞");
};
const within = (low, high) => x => Math.max(low, Math.min(high, x));
const plain = x => Number.isFinite(x) ? minus(Number(x.toPrecision(10))) : signed(x, 0);

// A slider and a field for its number, which takes values beyond the slider's, too.
function slider(id, label, min, max, step) {
  return `<div class="lowprec-toy-control"><label for="${id}">${label}</label>
    <input type="range" id="${id}" min="${min}" max="${max}" step="${step}">
    <input type="number" id="${id}-number" step="any" aria-label="${label}, as a number"></div>`;
}

function select(id, label, options) {
  const items = Object.entries(options).map(([value, text]) =>
    `<option value="${value}">${text}</option>`);
  return `<div class="lowprec-toy-control"><label for="${id}">${label}</label>
    <select id="${id}">${items.join("")}</select></div>`;
}

// Keeps state[name] and what shows it equal; keep: what becomes of a number that was typed.
function bind(toy, state, id, name, changed, keep = x => x) {
  const inputs = [...toy.querySelectorAll(`#${id}, #${id}-number`)];
  const show = () => inputs.forEach(input => { input.value = state[name]; });
  show();
  for (const input of inputs) {
    const isTyped = input.type === "number";
    input.addEventListener(isTyped ? "change" : "input", () => {
      if (input.tagName === "SELECT") state[name] = input.value;
      else if (Number.isFinite(input.valueAsNumber)) state[name] = keep(input.valueAsNumber);
      show();
      changed(name);
    });
  }
}

// ---- Toy 1: two terms and a small rest ----

const MODES = {
  nearest_even: "to nearest, halfway to even", toward_zero: "toward zero",
  stochastic: "stochastic, by chance",
};

// Why the sum becomes what it becomes, in words.
function reason(sum, rounded, mode) {
  const { round, sticky } = bits(sum.fp32), beyond = sticky.includes("1");
  if (!Number.isFinite(rounded)) return "The sum is beyond the largest BF16 number.";
  if (round === "0" && !beyond) return "All bits behind the kept ones are 0: nothing is lost.";
  if (mode === "toward_zero") return "The bits behind the kept ones are cut.";
  const went = Math.abs(rounded) > Math.abs(sum.fp32) ? "away from zero" : "toward zero";
  if (mode === "stochastic") {
    const share = 100 * parseInt(round + sticky, 2) / 2 ** 16;
    return `It goes away from zero with a chance of ${share.toFixed(1)} %. This time: ${went}.`;
  }
  if (round === "0") return "The round bit is 0: below halfway, toward zero.";
  if (beyond) return "The round bit is 1, and a sticky bit is 1: beyond halfway, away from zero.";
  return `The round bit is 1, all sticky bits are 0: halfway. The neighbour that ends in 0 lies ${went}.`;
}

// Which bits a carry has changed, in words; empty without one.
function carries(first, second, sum, rounded) {
  const exponents = [first, second].map(x => parseInt(bits(x).exponent, 2));
  const before = bits(sum.fp32), after = bits(rounded), said = [];
  if (parseInt(before.exponent, 2) > Math.max(...exponents)) {
    said.push("The terms carry into a new bit: the sum is one bit too long, its exponent one more.");
  }
  if (Number.isFinite(rounded) && before.exponent !== after.exponent) {
    said.push("Rounding carries into the exponent.");
  } else if (Math.abs(rounded) > Math.abs(sum.fp32)) {
    const kept = [...before.kept].filter((bit, i) => bit !== after.kept[i]).length;
    said.push(`Rounding away from zero changes ${kept} kept bit${kept > 1 ? "s" : ""}.`);
  }
  return said.join(" ");
}

function bitRow(title, x, all) {
  const b = bits(x);
  const behind = all ? `<td class="lowprec-toy-round">${b.round}</td><td>${b.sticky}</td>`
    : "<td></td><td></td>";
  return `<tr class="lowprec-toy-title"><th scope="rowgroup" colspan="5">${title}
    ${plain(x)}</th></tr><tr><td>${b.sign}</td><td>${b.exponent}</td>
    <td class="lowprec-toy-kept">${b.kept.slice(0, -1)}<b>${b.kept.at(-1)}</b></td>${behind}</tr>`;
}

// The running mean as a curve; the dashed line is the mean of all pairs, shown once one has drawn.
function plot(means, shown, expected) {
  const top = Math.abs(expected) > 0.4 ? 1 : 0.5, y = v => 75 - 65 * Math.max(-1, Math.min(1, v / top));
  const last = Math.max(1000, means.length), every = Math.ceil(last / 500), points = [];
  for (let i = 0; i < shown; i += every) points.push(`${44 + 290 * i / last},${y(means[i])}`);
  const marks = [top, top / 2, 0, -top / 2, -top].map(v => `<text x="38" y="${y(v) + 4}"
    text-anchor="end">${signed(v, 2)}</text><path class="grid" d="M44 ${y(v)}H334"/>`);
  return `${marks.join("")}
    ${shown ? `<path class="expected" d="M44 ${y(expected)}H334"/>` : ""}
    <polyline points="${points.join(" ")}"/>
    <text x="44" y="158">1</text><text x="334" y="158" text-anchor="end">${
      last.toLocaleString("en")} sums</text>`;
}

function sumToy(toy) {
  const state = {
    first: 2.40625, second: 2.296875, size: 0.03, mode: "nearest_even", signs: "one",
  };
  const word = generator(1);
  let chance = word(), errors = 0, means = [], expected, frame;
  toy.innerHTML = `
    ${slider("toy-first", "First term", -4, 4, 1 / 64)}
    ${slider("toy-second", "Second term", -4, 4, 1 / 64)}
    ${slider("toy-rest", "Rest, in ulp of the sum", -1, 1, 0.01)}
    ${select("toy-mode", "Rounding", MODES)}
    <div class="lowprec-toy-said" aria-live="polite"></div>
    <button type="button" class="again" hidden>Round again</button>
    <table class="lowprec-toy-bits"><thead><tr><th scope="col">sign</th><th scope="col">exponent</th>
      <th scope="col">kept</th><th scope="col">round</th><th scope="col">sticky</th></tr></thead>
      <tbody></tbody></table>
    <p>Now many sums: two random BF16 numbers from 2 to 4, and your rest.</p>
    ${select("toy-signs", "Sign of the rest", { one: "always as set", either: "either, by chance" })}
    <button type="button" class="draw">Draw 1,000 sums</button>
    <button type="button" class="clear">Start again</button>
    <div class="drawn" aria-live="polite"></div>
    <svg viewBox="0 0 340 164" role="img"></svg>`;
  const $ = selector => toy.querySelector(selector);

  function showSum() {
    const { first, second, size, mode } = state;
    const rest = restOf(first, second, size), sum = add(first, second, rest);
    const rounded = roundTo(sum.fp32, mode, chance);
    $(".lowprec-toy-said").innerHTML = `<p><strong>${plain(sum.exact)} becomes ${plain(rounded)}:
      an error of ${signed(errorOf(sum, rounded), 2)} ulp.</strong>
      ${reason(sum, rounded, mode)}</p><p>${carries(first, second, sum, rounded)}</p>`;
    $("tbody").innerHTML = bitRow("First term", first) + bitRow("Second term", second)
      + bitRow("Sum in FP32", sum.fp32, true) + bitRow("Stored in BF16", rounded);
    $(".again").hidden = mode !== "stochastic";
  }

  function showDrawn(shown = means.length) {
    $("svg").innerHTML = plot(means, shown, expected);
    if (shown < means.length) return;
    const [text, all] = means.length ? [
      `${means.length.toLocaleString("en")} sums: the mean error is ${signed(means.at(-1), 3)} ulp.`,
      `The dashed line, ${signed(expected, 3)}, is the mean of all 16,384 pairs.`,
    ] : ["No sum drawn yet.", "The curve will be the mean error in ulp, sum by sum."];
    $(".drawn").innerHTML = `<p><strong>${text}</strong> ${all}</p>`;
    $("svg").setAttribute("aria-label", `${text} ${all}`);
  }

  function clear() {
    cancelAnimationFrame(frame);
    [errors, means] = [0, []];
    expected = meanOfAllPairs(state.size, state.mode, state.signs === "either");
    showDrawn();
  }

  function drawMore() {
    cancelAnimationFrame(frame);
    const before = means.length;
    for (let i = 0; i < 1000; i++) {
      errors += draw(state.size, state.mode, state.signs === "either", word);
      means.push(errors / (means.length + 1));
    }
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const step = shown => {
      showDrawn(still ? means.length : Math.min(shown, means.length));
      if (!still && shown < means.length) frame = requestAnimationFrame(() => step(shown + 20));
    };
    step(before + 20);
  }

  const changed = name => {
    if (name !== "signs") showSum();
    if (["size", "mode", "signs"].includes(name)) clear();
  };
  const stored = x => within(-MAX, MAX)(roundTo(x, "nearest_even"));
  bind(toy, state, "toy-first", "first", changed, stored);
  bind(toy, state, "toy-second", "second", changed, stored);
  bind(toy, state, "toy-rest", "size", changed, within(-100, 100));
  bind(toy, state, "toy-mode", "mode", changed);
  bind(toy, state, "toy-signs", "signs", changed);
  $(".again").addEventListener("click", () => { chance = word(); showSum(); });
  $(".draw").addEventListener("click", drawMore);
  $(".clear").addEventListener("click", clear);
  showSum();
  clear();
}

// ---- Toy 2: a row of four keys ----

// An arrow from one point to another, in pixels of its drawing, and a label beyond its tip.
function arrow(kind, [x, y], [u, v]) {
  const size = Math.hypot(u - x, v - y);
  if (size < 0.5) return "";
  const [a, b] = [(u - x) / size, (v - y) / size], head = Math.min(8, size);
  const side = s => `${u - head * (a + s * 0.5 * b)},${v - head * (b - s * 0.5 * a)}`;
  return `<g class="${kind}"><path d="M${x} ${y}L${u} ${v}"/>
    <path class="head" d="M${side(1)}L${u},${v}L${side(-1)}"/></g>`;
}

function label(text, [u, v], [x, y]) {  // beside [u, v], on the side that is away from [x, y]
  const far = 11 / (Math.hypot(u - x, v - y) || 1);
  return `<text x="${u + far * (u - x)}" y="${v + far * (v - y) + 4}"
    text-anchor="middle">${text}</text>`;
}

const axes = `<path class="grid" d="M0 80H160M80 0V160"/>`;

function drawKeys(found) {
  const at = ([x, y]) => [80 + 11.5 * x, 80 - 11.5 * y], zero = at([0, 0]);
  const middle = at(found.weighted), tips = found.keys.map(at);
  return axes + tips.map((tip, j) => arrow("key", zero, tip) + label("k" + "₁₂₃₄"[j], tip, middle)).join("")
    + arrow("mean", zero, middle);
}

// dQ in units of the right dQ, so that the error has the length that the text says.
function drawGradient(found) {
  const unit = 45 / length(found.exact), at = ([x, y]) => [80 + unit * x, 80 - unit * y];
  const zero = at([0, 0]), tip = at(found.exact), along = found.weighted.map(x => 9 * x);
  const ends = [1, -1].map(s => at(found.exact.map((x, d) => x + s * along[d])).join(" "));
  return axes + `<path class="along" d="M${ends.join("L")}"/>`
    + arrow("right", zero, tip) + label("right dQ", at(found.exact.map(x => -x / 2)), zero)
    + arrow("wrong", tip, at(found.dq));
}

function rowToy(toy) {
  const state = { off: 2, centred: 0, angle: 0, fix: "as_rounded" };
  toy.innerHTML = `
    ${slider("toy-off", "δ is wrong by, in %", -5, 5, 0.5)}
    ${slider("toy-centred", "Mean key taken from all keys, in %", 0, 100, 5)}
    ${slider("toy-angle", "Keys turn from place to place, in °", 0, 90, 5)}
    ${select("toy-fix", "The fix: out of dQ goes", {
      as_rounded: "nothing", removed: "row sum × mean key (removed)",
      refined: "row sum × weighted key (refined)",
    })}
    <div class="lowprec-toy-said" aria-live="polite"></div>
    <div class="lowprec-toy-panels">
      <figure><svg class="keys" viewBox="0 0 160 160" role="img"></svg>
        <figcaption>Keys; dashed and thick: their weighted mean</figcaption></figure>
      <figure><svg class="gradient" viewBox="0 0 160 160" role="img"></svg>
        <figcaption>dQ, always drawn as long; dashed and thick: its error; dotted: along the
        weighted mean key</figcaption></figure></div>
    <table><thead><tr><th scope="col">key</th><th scope="col">P</th><th scope="col">dP</th>
      <th scope="col">dS = P (dP − δ)</th></tr></thead><tbody></tbody></table>`;
  const $ = selector => toy.querySelector(selector);

  function show() {
    const { off, centred, angle, fix } = state;
    const found = row({ off: off / 100, centred: centred / 100, angle, fix });
    const { delta, ds, rowSum, error } = found, ε = delta * off / 100;
    const cells = ds.map((x, j) => [`k${"₁₂₃₄"[j]}`, plain(ROW.weights[j]), plain(ROW.dp[j]),
      signed(x, 4)]);
    cells.push(["sum", "1", "", `<strong>${signed(rowSum, 4)}</strong>`]);
    $("tbody").innerHTML = cells.map(([name, ...rest]) => `<tr><th scope="row">${name}</th>${
      rest.map(x => `<td>${x}</td>`).join("")}</tr>`).join("");
    const percent = `${(100 * error).toFixed(error < 0.1 ? 1 : 0)} %`;
    const mean = length(found.weighted).toFixed(2);
    $(".lowprec-toy-said").innerHTML = `<p><strong>dQ is wrong by ${percent}.</strong> δ should be
      ${plain(delta)} and is off by ε = ${signed(ε, 4)}. So the row of dS sums to
      ${signed(rowSum, 4)}${fix === "as_rounded" ? "" : ", which dQ gets rid of"}. The weighted mean key is ${mean} long.</p>`;
    $(".keys").innerHTML = drawKeys(found);
    $(".keys").setAttribute("aria-label", `Four keys. Their weighted mean is ${mean} long.`);
    $(".gradient").innerHTML = drawGradient(found);
    $(".gradient").setAttribute("aria-label", `The right dQ and its error, ${percent} as long.`);
  }

  bind(toy, state, "toy-off", "off", show, within(-5, 5));
  bind(toy, state, "toy-centred", "centred", show, within(0, 100));
  bind(toy, state, "toy-angle", "angle", show, within(0, 90));
  bind(toy, state, "toy-fix", "fix", show);
  show();
}

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".lowprec-toy-sum").forEach(sumToy);
  document.querySelectorAll(".lowprec-toy-row").forEach(rowToy);
});
})();
