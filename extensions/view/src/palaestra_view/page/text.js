// Texts of a rollout: terminal colours, diffs, JSON as a tree, images, and long texts that open in parts.

import { h, plain, count, copy, say } from "./dom.js";
import { get, isFile } from "./api.js";

const ESCAPE = /\u001b(?:\[([0-?]*)[ -/]*([@-~])|[\]PX^_][^\u0007\u001b]*(?:\u0007|\u001b\\)?|[ -/]*[0-~])/g;
const SWITCH = { 1: "bold", 2: "dim", 3: "italic", 4: "underline" };

export function ansi(text, into) {
  if (!text.includes("\u001b")) {
    into.append(plain(text));
    return into;
  }
  let style = {}, start = 0;
  const put = (part) => {
    if (!part) return;
    const names = Object.entries(style).filter(([, value]) => value !== false).map(([name, value]) => (value === true ? `a-${name}` : `a-${name}${value}`));
    into.append(names.length ? h("span", { class: names.join(" ") }, part) : plain(part));
  };
  for (const found of text.matchAll(ESCAPE)) {
    put(text.slice(start, found.index));
    start = found.index + found[0].length;
    if (found[2] === "m") style = restyled(style, found[1]);
  }
  put(text.slice(start));
  return into;
}

function restyled(before, params) {
  let style = { ...before };
  const codes = params.slice(0, 200).split(/[;:]/).map((each) => Number(each) || 0);
  for (let place = 0; place < codes.length; place++) {
    const code = codes[place];
    if (code === 0) style = {};
    else if (SWITCH[code]) style[SWITCH[code]] = true;
    else if (code === 22) style.bold = style.dim = false;
    else if (code === 23) style.italic = false;
    else if (code === 24) style.underline = false;
    else if (code >= 30 && code <= 37) style.fg = code - 30;
    else if (code >= 90 && code <= 97) style.fg = code - 82;
    else if (code >= 40 && code <= 47) style.bg = code - 40;
    else if (code >= 100 && code <= 107) style.bg = code - 92;
    else if (code === 39) style.fg = false;
    else if (code === 49) style.bg = false;
    else if (code === 38 || code === 48) {
      const value = codes[place + 1] === 5 && codes[place + 2] < 16 ? codes[place + 2] : false;
      style[code === 38 ? "fg" : "bg"] = value;
      place += codes[place + 1] === 2 ? 4 : 2;
    }
  }
  return style;
}

export const isDiff = (text, name = "") => /^(diff --git |--- \S|\*\*\* Begin Patch|Index: )/m.test(text.slice(0, 2000)) || (/patch|diff/.test(name) && /^[+-]/m.test(text));

export function diff(text, into) {
  for (const line of text.split(/(?<=\n)/)) {
    const kind = /^(\+\+\+|---|diff |index |\*\*\*)/.test(line) ? "head" : { "+": "add", "-": "del", "@": "hunk" }[line[0]];
    into.append(kind ? h(`span.d-${kind}`, {}, line) : plain(line));
  }
  return into;
}

function markdown(text, into) {
  let fenced = false;
  for (const line of text.split(/(?<=\n)/)) {
    if (/^\s*(```|~~~)/.test(line)) {
      fenced = !fenced;
      into.append(h("span.m-fence", {}, line));
    } else if (fenced) into.append(h("span.m-code", {}, line));
    else if (/^#{1,6} /.test(line)) into.append(h("span.m-head", {}, line));
    else {
      let start = 0;
      for (const found of line.matchAll(/`[^`\n]+`|\*\*[^*\n]+\*\*/g)) {
        into.append(plain(line.slice(start, found.index)), h(found[0][0] === "`" ? "span.m-code" : "span.m-bold", {}, found[0]));
        start = found.index + found[0].length;
      }
      into.append(plain(line.slice(start)));
    }
  }
  return into;
}

const FOLD_LINES = 18, FOLD_CHARS = 2400;
const isCut = (value) => value !== null && typeof value === "object" && "$cut" in value;
export const start = (value) => (isCut(value) ? value.head : typeof value === "string" ? value : "");

// A text in a box. `kind` is ansi, markdown, diff or plain. `source` has the run and the rollout of a text that was cut.
export function block(value, { kind = "ansi", source = null, name = "", folded = null, caption = "" } = {}) {
  const cut = isCut(value) ? value : null;
  const text = cut ? cut.head : String(value ?? "");
  const paint = kind !== "markdown" && isDiff(text, name) ? diff : kind === "markdown" && !text.includes("\u001b") ? markdown : ansi;
  const body = h("pre", paint === diff ? { tabindex: "0" } : {}); // a diff scrolls sideways
  paint(text.replace(/\n+$/, ""), body);
  const lines = (text.match(/\n/g) || []).length + 1;
  const long = lines > FOLD_LINES + 6 || text.length > FOLD_CHARS || cut !== null;
  const box = h("div.block", { class: `${paint === diff ? "is-diff" : ""} ${kind === "markdown" ? "is-prose" : ""}` });
  if (caption) box.append(h("div.caption", {}, caption));
  box.append(body);
  const whole = async () => (cut ? (await get("text", { ...source, path: cut.$cut, start: 0, chars: 1000000 })).text : text);
  const tools = h("div.block-tools", {}, h("button", { type: "button", title: "Copy this text", "aria-label": "Copy this text", onclick: async () => copy(await whole(), "text copied") }, "copy"));
  box.append(tools);
  if (cut) box.append(rest(cut, source, body, paint));
  if (long) {
    const more = h("button.fold", { type: "button", "aria-expanded": "false" });
    const set = (open) => {
      box.classList.toggle("folded", !open);
      more.textContent = open ? "fold" : `show all ${cut ? `${count(cut.chars)} characters` : `${count(lines)} lines`}`;
      more.setAttribute("aria-expanded", String(open));
    };
    more.addEventListener("click", () => set(box.classList.contains("folded")));
    box.append(more);
    box.toggle = () => set(box.classList.contains("folded"));
    set(folded === null ? false : !folded);
  }
  return box;
}

const PART = 200000;
function rest(cut, source, body, paint) {
  let next = cut.head.length;
  const last = cut.chars - cut.tail.length;
  const gap = h("div.gap", {});
  const tail = h("pre.tail", {});
  paint(cut.tail, tail);
  const button = h("button", { type: "button" });
  const label = () => {
    if (next >= last) button.remove();
    button.textContent = `… ${count(last - next)} characters are not shown: show the next ${count(Math.min(PART, last - next))}`;
  };
  if (isFile()) gap.append(h("p.note", {}, `… ${count(last - next)} characters are not in this file …`));
  else {
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        const chars = Math.min(PART, last - next);
        const found = await get("text", { ...source, path: cut.$cut, start: next, chars });
        const part = h("span.part", {});
        paint(found.text, part);
        body.append(part);
        next += found.text.length || chars;
        label();
      } catch (error) {
        say(error.message);
      }
      button.disabled = false;
    });
    label();
    gap.append(button);
  }
  return h("div", {}, gap, tail);
}

// JSON as a tree that opens. Children are made when they are opened, and long lists in parts.
export function tree(value, source = null, name = "", depth = 0) {
  if (isCut(value) || (typeof value === "string" && (value.includes("\n") || value.length > 160))) return h("div.leaf", {}, name !== "" ? h("span.key", {}, `${name}: `) : null, block(value, { source, name }));
  if (value === null || typeof value !== "object") {
    return h("div.leaf", {}, name !== "" ? h("span.key", {}, `${name}: `) : null, h(`span.v-${value === null ? "null" : typeof value}`, {}, typeof value === "string" ? (value === "" ? "(empty)" : value) : JSON.stringify(value)));
  }
  const entries = Array.isArray(value) ? value.map((each, place) => [place, each]) : Object.entries(value);
  const small = JSON.stringify(value);
  if (!entries.length || (small.length < 90 && depth > 0)) return h("div.leaf", {}, name !== "" ? h("span.key", {}, `${name}: `) : null, h("span.v-json", {}, small));
  const summary = h("summary", {}, name !== "" ? h("span.key", {}, name) : null, h("span.dim", {}, Array.isArray(value) ? ` [${entries.length}]` : ` {${entries.length}}`));
  const node = h("details.tree", {}, summary);
  const fill = () => {
    if (node.childElementCount > 1) return;
    const body = h("div.children", {});
    node.append(body);
    const show = (from) => {
      for (const [key, each] of entries.slice(from, from + 100)) body.append(tree(each, source, String(key), depth + 1));
      if (entries.length > from + 100) {
        const more = h("button.more", { type: "button", onclick: () => { more.remove(); show(from + 100); } }, `${count(entries.length - from - 100)} more`);
        body.append(more);
      }
    };
    show(0);
  };
  node.addEventListener("toggle", fill);
  if (depth === 0) {
    fill();
    node.open = true;
  }
  return node;
}

const IMAGE = /^data:image\/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=\s]+$/;

// The content of a message: a text, or parts with texts and images. Only images that are in the record are shown.
export function content(value, options) {
  if (!Array.isArray(value)) return [value !== null && typeof value === "object" && !isCut(value) ? tree(value, options.source) : block(value, options)];
  return value.map((part) => {
    if (part && typeof part === "object") {
      if (part.text !== undefined) return block(part.text, options);
      const url = part.image_url && (part.image_url.url ?? part.image_url);
      if (isCut(url)) return picture(url, options.source);
      if (typeof url === "string" && IMAGE.test(url)) return h("img.picture", { src: url, alt: "an image of the conversation", loading: "lazy" });
      if (typeof url === "string") return h("p.note", {}, `an image at ${url} (not loaded)`);
    }
    return typeof part === "string" ? block(part, options) : tree(part, options.source);
  });
}

function picture(cut, source) {
  const node = h("img.picture", { alt: "an image of the conversation" });
  if (isFile()) return h("p.note", {}, "an image that is too large for this file");
  get("text", { ...source, path: cut.$cut, start: 0, chars: 1000000 }).then((found) => {
    if (IMAGE.test(found.text)) node.src = found.text;
  }, () => {});
  return node;
}
