"use strict";
(() => {
const $ = (id) => document.getElementById(id);
const make = (tag, fields = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), fields);
  node.append(...children);
  return node;
};
const bytes = (text) => {
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
};
const whole = (n) => n.toLocaleString("en-US");
const short = (v) => {
  const size = Math.abs(v);
  if (Number.isNaN(v)) return "–";
  if (size === 0) return "0";
  return size >= 100 ? v.toFixed(0) : size >= 1 ? v.toFixed(2) : size >= 0.001 ? v.toFixed(4) : v.toExponential(1);
};

// ---- what Python wrote: every piece of the text in turn. Matches stay packed until one of their tokens is clicked.
const scripts = [...document.querySelectorAll("script[data-kind]")];
const about = JSON.parse(scripts.pop().textContent);
const N = about.ends.at(-1), L = about.layers.length, H = about.heads, K = about.kept, S = about.signals.length;
const starts = new Uint32Array(N + 1), signals = new Float32Array(N * L * S), keep = new Float32Array(N * L * H), packed = [];
let text = "";
{
  const parts = [];
  let token = 0, place = 0;
  for (const script of scripts) {
    const piece = JSON.parse(script.textContent);
    script.remove();
    signals.set(new Float32Array(bytes(piece.signals).buffer), token * L * S);
    keep.set(new Float32Array(bytes(piece.keep).buffer), token * L * H);
    for (const length of new Uint16Array(bytes(piece.lengths).buffer)) { starts[token++] = place; place += length; }
    parts.push(piece.text);
    packed.push(piece.matches);
  }
  parts.push(about.rest);
  text = parts.join("");
  starts[N] = text.length;
}
const textOf = (a, b) => text.slice(starts[a], starts[b]);
const isEmpty = (t) => starts[t] === starts[t + 1];
// A character of several tokens stands with its last one.
const shownAs = (t) => {
  let at = t;
  while (at < N - 1 && isEmpty(at)) at++;
  while (at > 0 && isEmpty(at)) at--;
  return at;
};

const opened = new Map();
function matchesOf(t) {
  let index = 0;
  while (about.ends[index] <= t) index++;
  const first = index ? about.ends[index - 1] : 0, count = (about.ends[index] - first) * L * H * K;
  if (!opened.has(index)) {
    const raw = bytes(packed[index]);
    opened.set(index, [new Uint16Array(raw.buffer, 0, count), new Int8Array(raw.buffer, 2 * count, count)]);
  }
  const [distance, cosine] = opened.get(index), found = [];
  for (let layer = 0; layer < L; layer++) for (let head = 0; head < H; head++) for (let k = 0; k < K; k++) {
    const at = (((t - first) * L + layer) * H + head) * K + k;
    if (distance[at]) found.push({ token: t - distance[at], cosine: cosine[at] / 127, layer, head });
  }
  return found;
}

// ---- signals as columns: one number a token, of one memory or the mean of all that have it.
const SIGNALS = [
  { name: "surprise", hue: 18, told: "the memory's loss on the token before it was written: half of the squared error of its answer, summed over the dimensions of a value" },
  { name: "step θ", hue: 212, told: "how strongly the token was written" },
  { name: "momentum η", hue: 150, told: "how much of the surprise before it went on into the token's writing" },
  { name: "forget α", hue: 280, told: "how much of all it knew the memory let go at the token" },
  { name: "forgotten", hue: 330, told: "how much of what was written here the forget gates had let go by the text's end" },
];
const FORGOTTEN = 4, ALL = -1;
const columns = new Map();
function column(signal, layer) {
  const key = `${signal}/${layer}`;
  if (columns.has(key)) return columns.get(key);
  const out = new Float32Array(N);
  if (layer === ALL) {
    const parts = about.layers.map((_, l) => column(signal, l)).filter((part) => !Number.isNaN(part[0]));
    if (!parts.length) out.fill(NaN);
    for (const part of parts) for (let t = 0; t < N; t++) out[t] += part[t] / parts.length;
  } else if (signal === FORGOTTEN) {
    // Head by head: one that keeps everything forgets nothing, whatever the others do. No gate is NaN.
    for (let head = 0; head < H; head++) for (let t = N - 1, logKept = 0 * keep[layer * H]; t >= 0; t--) {
      out[t] -= Math.expm1(logKept) / H;
      logKept += keep[(t * L + layer) * H + head];
    }
  } else {
    for (let t = 0; t < N; t++) out[t] = signals[(t * L + layer) * S + signal];
  }
  columns.set(key, out);
  return out;
}
function range(values) {
  const every = Math.max(1, Math.floor(N / 20000)), some = [];
  for (let t = 0; t < N; t += every) some.push(values[t]);
  some.sort((a, b) => a - b);
  const low = some[Math.floor(0.02 * (some.length - 1))], high = some[Math.ceil(0.98 * (some.length - 1))];
  return { low, high, level: (v) => (high > low ? Math.min(1, Math.max(0, (v - low) / (high - low))) : 0) };
}

const now = { signal: 0, layer: ALL, head: ALL, token: null, matches: [], values: null, range: null };

// ---- the text: plain where it is far from the screen, one element a token where it is near. Both take the same room.
const blocks = [];
const near = new IntersectionObserver(
  (entries) => entries.forEach(({ target, isIntersecting }) => (isIntersecting ? fill : empty)(target)), { rootMargin: "700px 0px" });
function lay() {
  const page = document.createDocumentFragment();
  for (let t = 0, from = 0; t < N; t++) {
    const count = t + 1 - from, last = text.charCodeAt(starts[t + 1] - 1);
    if (t + 1 < N && !((count >= 256 && last === 10) || (count >= 1024 && last === 32) || count >= 1536)) continue;
    const block = make("div", { textContent: textOf(from, t + 1) });
    Object.assign(block, { from, to: t + 1, filled: false });
    blocks.push(block);
    page.append(block);
    from = t + 1;
  }
  $("text").append(page);
  blocks.forEach((block) => near.observe(block));
}
function fill(block) {
  if (block.filled) return;
  const tokens = [];
  for (let t = block.from; t < block.to; t++) {
    if (isEmpty(t)) continue;
    const token = make("span", { textContent: textOf(t, t + 1) });
    token.dataset.t = t;
    tokens.push(token);
  }
  block.replaceChildren(...tokens);
  block.filled = true;
  paint(block);
}
function empty(block) {
  if (block.filled) block.textContent = textOf(block.from, block.to);
  block.filled = false;
}
function paint(block) {
  const marked = new Set(now.matches.map((match) => shownAs(match.token)));
  const chosen = now.token === null ? null : shownAs(now.token);
  for (const token of block.children) {
    const t = +token.dataset.t;
    token.style.setProperty("--c", now.range.level(now.values[t]).toFixed(2));
    token.className = t === chosen ? "chosen" : marked.has(t) ? "match" : "";
  }
}
const blockOf = (t) => blocks.find((block) => t < block.to);
function show(t) {
  const block = blockOf(shownAs(t));
  fill(block);
  const token = block.querySelector(`[data-t="${shownAs(t)}"]`) || block;
  const box = token.getBoundingClientRect(), top = document.querySelector("#charts").getBoundingClientRect().bottom;
  const panel = $("detail").getBoundingClientRect(), phone = matchMedia("(max-width: 860px)").matches && !$("detail").hidden;
  const bottom = phone ? panel.top : innerHeight;
  if (box.top < top + 30 || box.bottom > bottom - 30) scrollBy(0, box.top - (top + bottom) / 2);
}

// ---- the two charts along the text.
const hueOf = (layer) => (200 + (layer * 300) / Math.max(1, L)) % 360;
function canvas(id) {
  const node = $(id), ratio = devicePixelRatio || 1, width = node.clientWidth, height = node.clientHeight;
  node.width = width * ratio;
  node.height = height * ratio;
  const pen = node.getContext("2d");
  pen.scale(ratio, ratio);
  return { pen, width, height };
}
const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
function overview() {
  const { pen, width, height } = canvas("overview"), shade = ink("--shade"), hue = SIGNALS[now.signal].hue;
  const bars = Math.min(N, Math.floor(width));
  for (let bar = 0; bar < bars; bar++) {
    const from = Math.floor((bar * N) / bars), to = Math.max(from + 1, Math.floor(((bar + 1) * N) / bars));
    let sum = 0;
    for (let t = from; t < to; t++) sum += now.values[t];
    const level = now.range.level(sum / (to - from));
    pen.fillStyle = `hsl(${hue} 75% ${shade} / ${0.35 + 0.6 * level})`;
    pen.fillRect((bar * width) / bars, height - 4 - level * (height - 10), Math.max(1, width / bars), level * (height - 10) + 2);
  }
  const [from, to] = visible();
  pen.strokeStyle = ink("--faint");
  pen.strokeRect((from / N) * width + 0.5, 0.5, Math.max(3, ((to - from) / N) * width) - 1, height - 1);
  pen.fillStyle = ink("--mark");
  for (const match of now.matches) pen.fillRect((match.token / N) * width, height - 6, 2, 6);
  if (now.token !== null) pen.fillRect((now.token / N) * width - 1, 0, 2, height);
}
function visible() {
  const top = $("charts").getBoundingClientRect().bottom;
  const first = blocks.find((block) => block.getBoundingClientRect().bottom > top) || blocks.at(-1);
  const last = blocks.findLast((block) => block.getBoundingClientRect().top < innerHeight) || first;
  const along = (block, y) => {
    const box = block.getBoundingClientRect();
    return block.from + (block.to - block.from) * Math.min(1, Math.max(0, (y - box.top) / Math.max(1, box.height)));
  };
  return [along(first, top), along(last, innerHeight)];
}
function norms() {
  const { pen, width, height } = canvas("norms");
  const rows = [about.start, ...about.norms], ends = [0, ...about.ends];
  const grown = rows.map((row) => row.map((norm, layer) => norm / rows[0][layer]));
  const flat = grown.flat(), low = flat.reduce((a, b) => Math.min(a, b)), high = flat.reduce((a, b) => Math.max(a, b));
  const y = (v) => height - 4 - ((v - low) / (high - low || 1)) * (height - 10);
  for (let layer = 0; layer < L; layer++) {
    pen.beginPath();
    grown.forEach((row, i) => pen.lineTo((ends[i] / N) * width, y(row[layer])));
    pen.strokeStyle = `hsl(${hueOf(layer)} 65% ${ink("--shade")})`;
    pen.globalAlpha = now.layer === ALL || now.layer === layer ? 1 : 0.25;
    pen.lineWidth = now.layer === layer ? 2.5 : 1.5;
    pen.stroke();
  }
  pen.globalAlpha = 1;
  if (now.token !== null) { pen.fillStyle = ink("--mark"); pen.fillRect((now.token / N) * width - 1, 0, 2, height); }
  const at = now.token === null ? rows.length - 1 : ends.findIndex((end) => end > now.token);
  const layers = now.layer === ALL ? about.layers.map((_, l) => l).slice(0, 4) : [now.layer];
  const keys = layers.map((l) => {
    const key = make("b", { textContent: `${about.layers[l]}: ${short(rows[0][l])} → ${short(rows[at][l])}` });
    key.style.color = `hsl(${hueOf(l)} 65% ${ink("--shade")})`;
    return key;
  });
  const more = now.layer === ALL && L > 4 ? [`and ${L - 4} more`] : [];
  $("keys").replaceChildren("norms", ...keys, ...more);
}
const draw = () => { overview(); norms(); };

// ---- a chosen token.
function quote(t, before, after) {
  const shown = shownAs(t), tidy = (s) => s.replace(/\s*\n\s*/g, " ⏎ ");
  const mark = textOf(shown, shown + 1).replace(/\n/g, "⏎").replace(/^\s+$/, "␣");
  return [tidy(text.slice(Math.max(0, starts[shown] - before), starts[shown])), make("mark", { textContent: mark }),
    tidy(text.slice(starts[shown + 1], starts[shown + 1] + after))];
}
function choose(t, scroll = true) {
  now.token = t;
  $("detail").hidden = t === null;
  now.matches = t === null ? [] : matchesOf(t).filter(
    (match) => (now.layer === ALL || match.layer === now.layer) && (now.head === ALL || match.head === now.head));
  if (t !== null) {
    location.replace(`#${t}`);
    tell(t);
    if (scroll) show(t);
  }
  blocks.filter((block) => block.filled).forEach(paint);
  draw();
}
function tell(t) {
  $("chosen").textContent = `token ${whole(t)} of ${whole(N)}${isEmpty(t) ? ", part of a character" : ""}`;
  $("context").replaceChildren(...quote(t, 70, 40));
  const head = make("tr", {}, ...["memory", "surprise", "θ", "η", "α", "forgotten"].map((name) => make("th", { textContent: name })));
  const rows = about.layers.map((name, layer) => {
    const cells = SIGNALS.map((_, signal) => {
      const value = column(signal, layer)[t], cell = make("td", { textContent: short(value) });
      cell.dataset.value = value;
      return cell;
    });
    return make("tr", { className: layer === now.layer ? "on" : "" }, make("td", { textContent: name }), ...cells);
  });
  $("values").replaceChildren(head, ...rows);
  const best = new Map();
  for (const match of now.matches) {
    const known = best.get(match.token) || { ...match, by: [] };
    known.cosine = Math.max(known.cosine, match.cosine);
    known.by.push(`${L > 1 ? `${about.layers[match.layer]} ` : ""}head ${match.head + 1}`);
    best.set(match.token, known);
  }
  const sorted = [...best.values()].sort((a, b) => b.cosine - a.cosine || b.token - a.token).slice(0, 12);
  $("matches").replaceChildren(...sorted.map((match) => {
    const bar = make("span", { className: "bar" }, make("i"));
    bar.firstChild.style.width = `${Math.max(0, match.cosine) * 100}%`;
    const fact = `${match.cosine.toFixed(2)} · ${whole(t - match.token)} back · ${match.by.join(", ")}`;
    const button = make("button", { onclick: () => choose(match.token) },
      make("span", { className: "quote" }, ...quote(match.token, 26, 9)), make("span", { className: "fact" }, bar, fact));
    Object.assign(button.dataset, { t: match.token, cosine: match.cosine });
    return make("li", {}, button);
  }));
  const spread = about.conv > 1 ? ` By the short convolution a value also holds the ${about.conv - 1} tokens before its own.` : "";
  $("explained").textContent = sorted.length
    ? `Asked with this token, the memory answers with something like what it was told at these of the last ${whole(about.reach)} tokens: cosine of answer and value. They are underlined in the text.${spread}`
    : "Nothing was told it before this token.";
}

// ---- controls.
function restyle() {
  now.values = column(now.signal, now.layer);
  now.range = range(now.values);
  document.documentElement.style.setProperty("--hue", SIGNALS[now.signal].hue);
  [...$("signals").children].forEach((button, i) => button.setAttribute("aria-checked", i === now.signal));
  $("low").textContent = short(now.range.low);
  $("high").textContent = short(now.range.high);
  $("meaning").textContent = `${SIGNALS[now.signal].name}: ${SIGNALS[now.signal].told}. Click a token to see what the memory answers there.`;
  choose(now.token, false);
}
SIGNALS.forEach((signal, index) => {
  const button = make("button", { textContent: signal.name, onclick: () => { now.signal = index; restyle(); } });
  button.setAttribute("role", "radio");
  button.disabled = Number.isNaN(column(index, ALL)[0]);
  $("signals").append(button);
});
$("layer").append(make("option", { value: ALL, textContent: L > 1 ? `mean of ${L}` : about.layers[0] }));
if (L > 1) about.layers.forEach((name, layer) => $("layer").append(make("option", { value: layer, textContent: name })));
$("head").append(make("option", { value: ALL, textContent: "all" }));
for (let head = 0; head < H; head++) $("head").append(make("option", { value: head, textContent: `${head + 1}` }));
$("layer").onchange = () => { now.layer = +$("layer").value; restyle(); };
$("head").onchange = () => { now.head = +$("head").value; choose(now.token, false); };
$("back").onclick = () => choose(Math.max(0, now.token - 1));
$("on").onclick = () => choose(Math.min(N - 1, now.token + 1));
$("close").onclick = () => choose(null);
$("text").onclick = (event) => { if (event.target.dataset.t && getSelection().isCollapsed) choose(+event.target.dataset.t); };
for (const id of ["overview", "norms"]) $(id).onclick = (event) => {
  const t = Math.min(N - 1, Math.floor((event.offsetX / $(id).clientWidth) * N)), block = blockOf(t);
  fill(block);
  (block.querySelector(`[data-t="${shownAs(t)}"]`) || block).scrollIntoView({ block: "center" });
};
addEventListener("keydown", (event) => {
  if (now.token === null || event.target.tagName === "SELECT") return;
  const key = { ArrowLeft: "back", ArrowRight: "on", Escape: "close" }[event.key];
  if (key) { event.preventDefault(); $(key).click(); }
});
let waiting = false;
addEventListener("scroll", () => {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; overview(); });
}, { passive: true });
new ResizeObserver(() => {
  document.documentElement.style.setProperty("--top", `${$("top").offsetHeight + 12}px`);
  draw();
}).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
const fromAddress = () => { const t = Number(location.hash.slice(1) || NaN); if (t >= 0 && t < N && t !== now.token) choose(Math.floor(t)); };
addEventListener("hashchange", fromAddress);

$("title").textContent = about.title;
$("facts").textContent = about.facts;
now.values = column(0, ALL);
now.range = range(now.values);
lay();
restyle();
fromAddress();
document.documentElement.dataset.ready = Math.round(performance.now());
})();
