// Small helpers: elements, formats, copying. Text from a run only ever becomes text nodes.

export function h(tag, props, ...children) {
  const [name, ...classes] = tag.split(".");
  const node = document.createElement(name || "div");
  if (classes.length) node.className = classes.join(" ");
  for (const [key, value] of Object.entries(props || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, each] of Object.entries(value)) node.style.setProperty(name, each);
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key === "class") node.className += ` ${value}`;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  add(node, children);
  return node;
}

export function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    node.append(child instanceof Node ? child : document.createTextNode(plain(String(child))));
  }
  return node;
}

const SVG = "http://www.w3.org/2000/svg";
export function svg(tag, props, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(props || {})) if (value !== null && value !== undefined) node.setAttribute(key, value);
  for (const child of children.flat(Infinity)) if (child) node.append(child instanceof Node ? child : document.createTextNode(plain(String(child))));
  return node;
}

// Control characters become visible, and characters that reorder their neighbours become their names.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]/gu;
export function plain(text) {
  return text.replace(/\r\n/g, "\n").replace(HIDDEN, (each) => {
    const code = each.codePointAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    if (code < 0xa0 || (code >= 0xd800 && code < 0xe000)) return "\ufffd";
    return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

export const count = (value) => (value === null || value === undefined ? "–" : Number(value).toLocaleString("en-US"));

export function short(value) {
  if (value === null || value === undefined) return "–";
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(value) >= size) return `${(value / size).toPrecision(3).replace(/\.?0+$/, "")}${unit}`;
  return `${Math.round(value * 100) / 100}`;
}

export function figure(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return Math.abs(value) < 1e6 ? String(value) : short(value);
  return Math.abs(value) >= 1e-3 && Math.abs(value) < 1e5 ? value.toFixed(digits) : value.toPrecision(3);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return value ? `${Math.max(1, Math.round(value * 1000))} ms` : "0 s";
  if (value < 90) return `${value.toFixed(value < 10 ? 1 : 0)} s`;
  if (value < 5400) return `${Math.floor(Math.round(value) / 60)}m ${Math.round(value) % 60}s`;
  return `${(value / 3600).toFixed(1)} h`;
}

export function when(at) {
  if (!at) return "–";
  const date = new Date(at * 1000);
  return `${date.toISOString().slice(0, 10)} ${date.toTimeString().slice(0, 5)}`;
}

export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

export function verdictOf(reward, outcome) {
  if (outcome === null) return "flying";
  if (reward === null || reward === undefined) return "unscored";
  return reward >= 1 ? "full" : reward > 0 ? "partial" : "zero";
}

export function rewardTag(reward, outcome = "") {
  const verdict = verdictOf(reward, outcome);
  return h(`span.reward.is-${verdict}`, {}, verdict === "flying" ? "running" : reward === null || reward === undefined ? "unscored" : figure(reward, 2));
}

export function chip(text, kind = "", props = {}) {
  return h(`${props.onclick ? "button" : "span"}.chip${kind ? `.${kind}` : ""}`, { ...(props.onclick ? { type: "button" } : {}), ...props }, text);
}

export function say(text) {
  const place = document.getElementById("status");
  place.textContent = plain(text);
  place.classList.add("on");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => place.classList.remove("on"), 2500);
}

export async function copy(text, what = "copied") {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  say(what);
}

export function link(view, params, ...children) {
  return h("a", { href: address(view, params) }, ...children);
}

export function address(view, params = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) if (each !== undefined && each !== null && each !== "") query.append(name, each);
  }
  const text = query.toString();
  return `#/${view}${text ? `?${text}` : ""}`;
}

// A small strip for a mean and its interval on a scale from low to high.
export function strip(mean, interval, low = 0, high = 1) {
  if (mean === null || mean === undefined) return null;
  const at = (value) => `${Math.max(0, Math.min(100, (100 * (value - low)) / (high - low || 1)))}`;
  const node = svg("svg", { class: "strip", viewBox: "0 0 100 12", preserveAspectRatio: "none", "aria-hidden": "true" });
  node.append(svg("line", { x1: 0, x2: 100, y1: 6, y2: 6, class: "axis" }));
  if (interval) node.append(svg("rect", { x: at(interval[0]), width: Math.max(0.5, at(interval[1]) - at(interval[0])), y: 3.5, height: 5, class: "range" }));
  node.append(svg("rect", { x: Math.max(0, at(mean) - 0.9), width: 1.8, y: 0.5, height: 11, class: "mean" }));
  return node;
}

// A stacked bar of counts by name, with a legend in its title.
export function stack(counts, order = []) {
  const names = [...order.filter((name) => name in counts), ...Object.keys(counts).filter((name) => !order.includes(name))];
  const total = names.reduce((sum, name) => sum + counts[name], 0) || 1;
  return h("span.stack", { title: plain(names.map((name) => `${name} ${counts[name]}`).join(", ")) },
    names.map((name) => h("i", { class: `o-${/^[a-z_]+$/.test(name) ? name : "other"}`, style: { width: `${(100 * counts[name]) / total}%` } })));
}

// A text that is cut says so.
export const clipped = (text, most) => (text.length > most ? `${text.slice(0, most)}…` : text);
export const oneLine = (text) => text.replace(/\s+/g, " ");
