// The page's frame: addresses, keys, theme, and the views.

import { h, add, address, say, plain } from "./dom.js";
import * as api from "./api.js";
import * as runs from "./runs.js";
import * as run from "./run.js";
import * as rollout from "./rollout.js";
import * as tokens from "./tokens.js";
import * as siblings from "./siblings.js";

const VIEWS = { runs: runs.show, run: run.show, rollout: rollout.show, tokens: tokens.show, siblings: siblings.show };
const main = document.getElementById("main"), bar = document.getElementById("bar");
let view = null, turn = 0;

function theme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
}

function stored(name, value) {
  try {
    if (value === undefined) return localStorage.getItem(name);
    localStorage.setItem(name, value);
  } catch {
    return null;
  }
  return value;
}

const shell = {
  title(name, path) {
    document.title = plain(`${name} · Palaestra`);
    bar.replaceChildren(
      h("a.brand", { href: "#/runs", title: "all runs" }, "palaestra"),
      h("nav.path", { "aria-label": "Path" }, path.map(([label, href], place) => [place ? h("span.sep", {}, "›") : null, href ? h("a", { href }, label) : h("span", { "aria-current": "page" }, label)])),
      h("span.right", {}, h("span.live", { title: "the page follows the run" }),
        h("button.quiet", { type: "button", title: "light or dark", "aria-label": "Light or dark", onclick: () => {
          const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
          theme(stored("theme", dark ? "light" : "dark") || (dark ? "light" : "dark"));
        } }, "◐"),
        h("button.quiet", { type: "button", title: "keys (?)", "aria-label": "Keys", onclick: help }, "?")));
  },
};

function place() {
  const [name, text] = location.hash.replace(/^#\//, "").split(/\?(.*)/s);
  if (!name && api.isFile()) return { name: "run", params: new URLSearchParams({ run: api.ofFile() }) };
  return { name: name || "", params: new URLSearchParams(text || "") };
}

async function open({ keepScroll = false } = {}) {
  const mine = ++turn;
  const { name, params } = place();
  const show = VIEWS[name || "runs"];
  if (!keepScroll) main.setAttribute("aria-busy", "true");
  const scroll = scrollY;
  try {
    if (!show) throw new Error(`there is no view ${name}`);
    const made = await show(params, shell);
    if (mine !== turn) return;
    view = made;
    const opened = keepScroll ? folds() : null, focused = keepScroll ? focus() : null;
    main.replaceChildren(made.node);
    if (opened) refold(opened);
    if (focused) requestAnimationFrame(() => requestAnimationFrame(() => refocus(focused))); // lists draw their rows later
    document.body.classList.toggle("is-live", Boolean(made.following) && !api.isFile());
    scrollTo(0, keepScroll ? scroll : 0);
  } catch (error) {
    if (mine !== turn) return;
    view = { live: "*", keys: {} }; // what is missing may still be read
    shell.title("problem", [["runs", "#/runs"], ["problem", null]]);
    main.replaceChildren(h("p.callout.is-bad", { role: "alert" }, String(error.message || error)), h("p", {}, h("a", { href: "#/runs" }, "all runs")));
  }
  main.removeAttribute("aria-busy");
}

// What a reader had opened stays open when a live view is drawn again.
const folds = () => [...main.querySelectorAll("details, .block")].map((each) => (each.matches("details") ? each.open : each.classList.contains("folded")));
function refold(before) {
  [...main.querySelectorAll("details, .block")].forEach((each, place) => {
    if (before[place] === undefined) return;
    if (each.matches("details")) each.open = before[place];
    else if (each.toggle && each.classList.contains("folded") !== before[place]) each.toggle();
  });
}

const nameOf = (node) => `${node.tagName} ${node.getAttribute("href") || node.getAttribute("aria-label") || node.textContent}`;
const focus = () => (document.activeElement !== main && main.contains(document.activeElement) ? nameOf(document.activeElement) : null);
function refocus(name) {
  if (document.activeElement === document.body) [...main.querySelectorAll("a, button, summary, [tabindex]")].find((each) => nameOf(each) === name)?.focus({ preventScroll: true });
}

function help() {
  const box = h("dialog.help", { "aria-label": "Keys" });
  const rows = [...Object.entries(view?.keys || {}).map(([key, [what]]) => [key, what]), ["u", "one level up"], ["?", "this list"], ["Escape", "leave a field or this list"]];
  add(box, [h("h2", {}, "Keys"), h("dl", {}, rows.map(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)])), h("button.button", { type: "button", onclick: () => box.close() }, "close")]);
  box.addEventListener("close", () => box.remove());
  document.body.append(box);
  box.showModal();
}

addEventListener("keydown", (event) => {
  if (event.key === "Escape" && document.activeElement?.matches("input")) return document.activeElement.blur();
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea, dialog")) return;
  if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
  if (event.key === "?") return help();
  if (event.key === "u") {
    const up = [...bar.querySelectorAll(".path a")].pop();
    if (up) location.hash = up.getAttribute("href");
    return;
  }
  const act = view?.keys?.[event.key];
  if (act) {
    event.preventDefault();
    act[1]();
  }
});

let refreshing = null, missed = false;
const away = () => document.hidden || Boolean(document.activeElement?.matches("input, select"));
function changed(event) {
  const live = view?.live;
  if (!live || !(live === "*" || event.run === undefined || event.run === live)) return;
  if (refreshing) return;
  refreshing = setTimeout(async () => {
    refreshing = null;
    if (away()) missed = true; // until the reader is back
    else if (view?.live) await open({ keepScroll: true });
  }, 700);
}

function catchUp() {
  if (!missed || away()) return;
  missed = false;
  changed({});
}
document.addEventListener("visibilitychange", catchUp);
document.addEventListener("focusout", () => setTimeout(catchUp));

theme(stored("theme"));
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", () => open());
try {
  await api.open();
  await open();
  api.listen(changed);
} catch (error) {
  say(error.message);
}
