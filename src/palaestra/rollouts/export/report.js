"use strict";
(() => {
  document.documentElement.classList.add("js");
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const one = (selector) => document.querySelector(selector);
  const rollouts = all(".rollout");
  const search = one("#search"), outcome = one("#outcome"), verdict = one("#verdict"), help = one("#help");

  const shown = (rollout) => !rollout.hidden && !rollout.closest(".group").hidden;
  const matches = (rollout, words) =>
    (!outcome.value || rollout.dataset.outcome === outcome.value) &&
    (!verdict.value || rollout.dataset.verdict === verdict.value) &&
    (!words || (rollout.dataset.task + "\n" + rollout.textContent).toLowerCase().includes(words));

  function filter() {
    const words = search.value.trim().toLowerCase();
    const filtering = Boolean(words || outcome.value || verdict.value);
    let count = 0;
    for (const rollout of rollouts) {
      rollout.hidden = !matches(rollout, words);
      count += rollout.hidden ? 0 : 1;
      one(`a[href="#${rollout.id}"]`).classList.toggle("dim", rollout.hidden);
    }
    for (const group of all(".group")) {
      const inside = all(".rollout", group);
      const itself = !inside.length && !outcome.value && !verdict.value &&
        group.textContent.toLowerCase().includes(words);
      group.hidden = filtering && !itself && inside.every((rollout) => rollout.hidden);
    }
    one("#count").textContent = filtering ? `${count} of ${rollouts.length} rollouts` : "";
  }

  function reveal(rollout) {
    rollout.closest(".group").open = true;
    rollout.open = true;
    mark(rollout);
    rollout.scrollIntoView({ block: "start" });
  }

  function mark(rollout) {
    all(".current").forEach((other) => other.classList.remove("current"));
    rollout.classList.add("current");
  }

  function step(by) {
    const list = rollouts.filter(shown);
    if (!list.length) return;
    const at = list.indexOf(one(".current"));
    const next = by === Infinity ? list.length - 1 : by === -Infinity ? 0 : at < 0 ? (by > 0 ? 0 : list.length - 1) : at + by;
    const target = list[Math.max(0, Math.min(list.length - 1, next))];
    const before = one(".current");
    if (before && before !== target) before.open = false;
    history.replaceState(null, "", "#" + target.id);
    reveal(target);
  }

  function toggleAll() {
    const folds = all(".group, .rollout").filter((fold) => !fold.hidden);
    const open = !folds.every((fold) => fold.open);
    folds.forEach((fold) => { fold.open = open; });
  }

  const keys = {
    j: () => step(1),
    k: () => step(-1),
    g: () => step(-Infinity),
    G: () => step(Infinity),
    o: () => { const rollout = one(".current"); if (rollout) rollout.open = !rollout.open; },
    e: toggleAll,
    "/": () => search.focus(),
    "?": () => { help.hidden = !help.hidden; },
  };

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { help.hidden = true; document.activeElement.blur(); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT)$/.test(event.target.tagName)) return;
    if (Object.hasOwn(keys, event.key)) { event.preventDefault(); keys[event.key](); }
  });

  document.addEventListener("click", (event) => {
    const target = event.target;
    if (target.classList.contains("more")) {
      const open = target.parentElement.classList.toggle("open");
      target.textContent = open ? "show less" : target.dataset.label;
    }
    const rollout = target.closest(".rollout");
    if (rollout) mark(rollout);
  });

  function follow() {
    const rollout = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (rollout && rollout.classList.contains("rollout")) reveal(rollout);
  }

  let timer;
  search.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(filter, 150); });
  outcome.addEventListener("change", filter);
  verdict.addEventListener("change", filter);
  one("#toggle").addEventListener("click", toggleAll);
  one("#keys").addEventListener("click", keys["?"]);
  window.addEventListener("hashchange", follow);
  follow();
})();
