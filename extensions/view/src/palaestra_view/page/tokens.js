// The exact tokens of one row: what was sampled, what is trained on, and how likely each token was.

import { h, add, count, figure, address, plain, copy, say, plural } from "./dom.js";
import { getKept } from "./api.js";

const LINE = 22;

export function unpack(record) {
  const bytes = (text) => Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const ids = new Int32Array(bytes(record.ids).buffer), mask = bytes(record.mask);
  const logprobs = record.logprobs ? new Float32Array(bytes(record.logprobs).buffer) : null;
  let texts = null;
  if (record.texts) texts = new Map([...new Set(ids)].sort((a, b) => a - b).map((id, place) => [id, record.texts[place]]));
  return { ids, mask, logprobs, texts };
}

export function face(id, texts) {
  const text = texts && texts.get(id);
  if (text === undefined || text === null) return String(id);
  return plain(text.replace(/\t/g, "→")).replace(/\n/g, "↵") || "∅";
}

// Five steps of surprise: a token that was nearly certain is plain, one below 1 % is strongest.
export function heat(logprob) {
  const p = Math.exp(logprob);
  return p > 0.9 ? 0 : p > 0.5 ? 1 : p > 0.2 ? 2 : p > 0.05 ? 3 : p > 0.01 ? 4 : 5;
}

export async function show(params, shell) {
  const [run, id, row] = [params.get("run"), params.get("id"), params.get("row") || "0"];
  const record = await getKept("tokens", { run, id, row });
  shell.title(`tokens of ${id}`, [["runs", "#/runs"], [run, address("run", { run })], [id, address("rollout", { run, id })], ["tokens", null]]);
  const { ids, mask, logprobs, texts } = unpack(record);
  const versions = [...new Set(record.spans.map((span) => span[4]).filter(Boolean))];
  const spanOf = new Uint32Array(ids.length);
  record.spans.forEach(([, start, stop], place) => spanOf.fill(place, start, stop));
  let mode = params.get("colour") || (logprobs ? "logprob" : "mask"), at = -1, lines = [];
  const info = h("div.token-info", { "aria-live": "polite" }, h("span.dim", {}, "Point at a token, or use the arrow keys."));
  const page = h("div.token-page", { tabindex: "0", role: "application", "aria-label": "Tokens; use the arrow keys", "aria-keyshortcuts": "ArrowLeft ArrowRight ArrowUp ArrowDown" });
  const inner = h("div.virtual", {});
  page.append(inner);
  page.classList.toggle("ids", !texts);

  function layout() {
    const probe = h("span.token", {}, "0".repeat(50));
    inner.replaceChildren(h("div.token-line", {}, probe));
    const width = (probe.getBoundingClientRect().width - 2) / 50 || 7.2;
    const columns = Math.max(16, Math.floor((page.clientWidth - 96) / width));
    lines = [];
    let from = 0, used = 0;
    const cut = (place) => { lines.push(from); from = place; used = 0; };
    for (let place = 0; place < ids.length; place++) {
      const text = face(ids[place], texts);
      const wide = Math.min(columns, width_of(text) + (texts ? 0.3 : 1));
      if (place > from && (used + wide > columns || record.spans[spanOf[place]][1] === place)) cut(place);
      used += wide;
      if (texts && text.endsWith("↵")) cut(place + 1);
    }
    if (from < ids.length) lines.push(from);
    inner.style.setProperty("height", `${lines.length * LINE}px`);
  }

  let shown = [-1, -1];
  const kept = new Map(); // the lines on the screen, which stay while they are
  function paint(again = false) {
    const first = Math.max(0, Math.floor(page.scrollTop / LINE) - 10), last = Math.min(lines.length, Math.ceil((page.scrollTop + page.clientHeight) / LINE) + 10);
    if (!again && first === shown[0] && last === shown[1]) return;
    shown = [first, last];
    if (again) {
      kept.clear();
      inner.replaceChildren();
    }
    for (const [line, node] of kept) if (line < first || line >= last) {
      node.remove();
      kept.delete(line);
    }
    const rows = document.createDocumentFragment();
    for (let line = first; line < last; line++) if (!kept.has(line)) {
      const node = makeLine(line);
      kept.set(line, node);
      rows.append(node);
    }
    inner.append(rows);
  }

  function makeLine(line) {
    const node = document.createElement("div");
    node.className = "token-line";
    node.style.transform = `translateY(${line * LINE}px)`;
    const start = lines[line], stop = line + 1 < lines.length ? lines[line + 1] : ids.length;
    const gutter = document.createElement("span");
    gutter.className = "gutter";
    const span = record.spans[spanOf[start]];
    if (span && span[1] === start) {
      gutter.textContent = `${span[3] ? `t${span[3]} ` : ""}${span[0]}${span[5] ? ` ${span[5]}` : ""}`;
      node.classList.add(`begins-${span[0]}`);
    } else gutter.textContent = String(start);
    node.append(gutter);
    for (let place = start; place < stop; place++) {
      const token = document.createElement("span");
      token.className = classes(place);
      token.dataset.i = place;
      token.textContent = face(ids[place], texts);
      node.append(token);
    }
    return node;
  }

  function classes(place) {
    const sampled = logprobs ? logprobs[place] <= 0.01 : mask[place] > 0;
    let name = mask[place] ? "token trained" : sampled ? "token untrained" : "token given";
    if (mode === "logprob" && sampled && logprobs) name += ` heat${heat(logprobs[place])}`;
    else if (mode === "mask" && mask[place]) name += " in-mask";
    else if (mode === "version") name += ` version${versions.indexOf(record.spans[spanOf[place]][4]) % 6}`;
    else if (mode === "turn") name += ` turn${(record.spans[spanOf[place]][3] || 0) % 2}`;
    return place === at ? `${name} focus` : name;
  }

  function focus(place, reveal = true) {
    if (!ids.length) return;
    const before = at;
    at = Math.max(0, Math.min(ids.length - 1, place));
    for (const each of [before, at]) {
      const node = inner.querySelector(`[data-i="${each}"]`);
      if (node) node.className = classes(each);
    }
    if (reveal) {
      const line = lineOf(at);
      if (line * LINE < page.scrollTop || (line + 1) * LINE > page.scrollTop + page.clientHeight) page.scrollTop = Math.max(0, line * LINE - page.clientHeight / 3);
      paint();
    }
    const span = record.spans[spanOf[at]], logprob = logprobs && logprobs[at] <= 0.01 ? logprobs[at] : null;
    const fact = (name, value) => h("span.pair", {}, h("span.key", {}, name), " ", h("span.value", {}, value));
    info.replaceChildren(...[fact("position", count(at)), fact("id", String(ids[at])), texts ? fact("text", JSON.stringify(plain(texts.get(ids[at]) ?? ""))) : null,
      logprob === null ? fact("log-probability", "not sampled") : fact("log-probability", `${logprob.toFixed(4)} (p ${Math.exp(logprob).toPrecision(3)})`),
      fact("mask", mask[at] ? "trained" : "not trained"), span && span[3] ? fact("turn", String(span[3])) : null, span ? fact("from", span[0] === "prompt" ? "prompt: template, task and tools" : "the model") : null,
      span && span[4] ? fact("policy", span[4]) : null, span && span[5] ? fact("reason", span[5]) : null, record.stop_ids.includes(ids[at]) ? fact("ends", "a turn") : null,
      record.advantage !== null && mask[at] ? fact("reward − group mean", figure(record.advantage)) : null].filter(Boolean));
  }

  function lineOf(place) {
    let [low, high] = [0, lines.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (lines[middle] <= place) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  const updown = (by) => {
    const line = lineOf(Math.max(0, at)), column = Math.max(0, at) - lines[line], target = Math.max(0, Math.min(lines.length - 1, line + by));
    const stop = target + 1 < lines.length ? lines[target + 1] : ids.length;
    focus(Math.min(lines[target] + column, stop - 1));
  };
  const surprising = (by) => {
    for (let place = at + by; place >= 0 && place < ids.length; place += by) if (logprobs && logprobs[place] <= 0.01 && heat(logprobs[place]) >= 4) return focus(place);
    say("there is no further token below 5%");
  };
  const border = (by) => {
    const starts = record.spans.map((span) => span[1]);
    const next = by > 0 ? starts.find((start) => start > at) : [...starts].reverse().find((start) => start < at);
    if (next !== undefined) focus(next);
  };
  page.addEventListener("pointerover", (event) => event.target.dataset.i !== undefined && focus(Number(event.target.dataset.i), false));
  page.addEventListener("click", (event) => event.target.dataset.i !== undefined && focus(Number(event.target.dataset.i), false));
  page.addEventListener("keydown", (event) => {
    const act = { ArrowRight: () => focus(at + 1), ArrowLeft: () => focus(at - 1), ArrowDown: () => updown(1), ArrowUp: () => updown(-1) }[event.key];
    if (!act || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act();
  });
  let waiting = false;
  page.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; paint(); });
  }, { passive: true });
  const again = () => { if (!page.isConnected) return removeEventListener("resize", again); layout(); paint(true); };
  addEventListener("resize", again, { passive: true });

  const modes = [["logprob", "log-probability", logprobs], ["mask", "mask", true], ["version", "policy version", versions.length > 0], ["turn", "turn", true]].filter(([, , known]) => known);
  const choose = h("select", { "aria-label": "Colour by", onchange: () => { mode = choose.value; legend(); paint(true); } }, modes.map(([name, label]) => h("option", { value: name, selected: name === mode }, `colour by ${label}`)));
  const key = h("span.legend", {});
  function legend() {
    const item = (name, text) => h("span", {}, h(`span.token.${name}`, {}, "abc"), ` ${text} `);
    key.replaceChildren(...{
      logprob: () => ["> 90%", "50–90", "20–50", "5–20", "1–5", "< 1%"].map((text, place) => item(`heat${place}`, text)),
      mask: () => [item("in-mask", "trained"), item("given", "not trained")],
      version: () => versions.map((version, place) => item(`version${place % 6}`, version)),
      turn: () => [item("turn0", "even turn"), item("turn1", "odd turn")],
    }[mode]());
  }
  legend();
  const verdict = record.verdict;
  const trained = mask.reduce((sum, each) => sum + (each ? 1 : 0), 0);
  const node = h("div.tokens", {},
    h("section.head", { "aria-label": "The row" }, h("div.title", {}, h("h1", {}, "Tokens ", h("span.dim", {}, id)), h("span.actions", {}, h("a.button", { href: address("rollout", { run, id }) }, "conversation"), h("button.button", { type: "button", onclick: () => copy(`[${[...ids].join(", ")}]`, `${count(ids.length)} ids copied`) }, "copy ids"))),
      h("div.chips", {}, verdict ? h("span.chip", { class: verdict.ok ? "good" : "bad" }, verdict.ok ? "verified: T1 to T4 hold" : verdict.violation) : h("span.chip", {}, "not provable: no ledger"), h("span.chip", {}, `${plural(ids.length, "token")}, ${count(trained)} trained`), record.advantage !== null ? h("span.chip", {}, `reward − group mean ${figure(record.advantage)}`) : null, versions.length > 1 ? h("span.chip.warn", {}, `${versions.length} policy versions in one rollout`) : versions.length ? h("span.chip", {}, `policy ${versions[0]}`) : null,
        texts ? null : h("span.chip.warn", { title: "start the viewer with --tokenizer FOLDER" }, "no tokenizer: ids are shown")),
      record.rows.length > 1 ? h("nav.tabs", { "aria-label": "Rows" }, record.rows.map((each, place) => h("a", { href: address("tokens", { run, id, row: place }), "aria-current": place === record.row ? "page" : null }, `${place}: ${each.reason.replaceAll("_", " ")}`, h("span.dim", {}, ` ${count(each.tokens)}`)))) : null),
    h("div.tools", {}, choose, key), info, page);
  requestAnimationFrame(() => {
    layout();
    paint(true);
    if (params.has("at")) focus(Number(params.get("at")));
  });
  return {
    node,
    keys: {
      l: ["next token", () => focus(at + 1)], h: ["previous token", () => focus(at - 1)],
      j: ["next line", () => updown(1)], k: ["line before", () => updown(-1)],
      n: ["next surprising token (below 5%)", () => surprising(1)], N: ["surprising token before", () => surprising(-1)],
      "]": ["next segment border", () => border(1)], "[": ["segment border before", () => border(-1)],
      c: ["copy an address of this token", () => copy(`${location.origin}${location.pathname}${address("tokens", { run, id, row, at: Math.max(0, at) })}`, "address copied")],
    },
  };
}

function width_of(text) {
  let wide = 0;
  for (const each of text) wide += each.codePointAt(0) >= 0x1100 ? 2 : 1;
  return wide;
}
