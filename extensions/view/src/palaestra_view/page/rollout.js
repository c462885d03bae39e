// One rollout: the verdict and its evidence, the time it took, and the conversation turn by turn.

import { h, add, chip, count, seconds, figure, rewardTag, link, address, copy, plural, when, say, plain, clipped } from "./dom.js";
import { get, getKept, isFile } from "./api.js";
import { isTests, passed, reasons as reasonsOf } from "./reasons.js";
import { asText } from "./filter.js";
import { forksOf, mark, origin } from "./forks.js";
import { judgementOf, judgement, gradeFacts } from "./judgement.js";
import { block, content, tree, start, isDiff } from "./text.js";

const STAGES = ["admit", "acquire", "setup", "agent", "model", "tool", "user", "seal", "grade"];
const THINK = /<think>([\s\S]*?)(?:<\/think>|$)\s*/g;

export async function show(params, shell) {
  const [run, id] = [params.get("run"), params.get("id")];
  const [recorded, forked, judged, list] = await Promise.all([getKept("rollout", { run, id }), forksOf(run, id), judgementOf(run, id), listOf(params)]);
  const source = { run, id }, rollout = list ? { ...recorded, before: list.before?.id, after: list.after?.id } : recorded;
  const rolloutOf = (name) => address("rollout", { run, id: rollout[name], ...(list && list[name].params) });
  shell.title(`${rollout.task_id} #${rollout.index}`, [["runs", "#/runs"], [run, address("run", { run })], [rollout.task_id, address("run", { run, where: JSON.stringify([["group", "=", rollout.group_id]]) })], ...(list ? [[list.name, address("run", { run, ...list.params })]] : []), [`#${rollout.index}`, null]]);
  const turns = conversation(rollout, source);
  const outline = h("nav.outline", { "aria-label": "Turns" }, turns.map((turn, place) => turn.entry(place)));
  mark(turns, forked);
  for (const turn of turns) turn.node.classList.toggle("shared", Boolean(rollout.origin) && turn.number !== null && turn.number <= rollout.origin.turn);
  const main = h("div.rollout", {}, head(rollout, run, judged, rolloutOf, [...origin(rollout, forked.origin), judgement(run, rollout, judged)]), h("div.columns", {}, outline, h("div.thread", {}, turns.map((turn) => turn.node), endings(rollout, source))));
  let at = -1;
  const go = (place, scroll = true) => {
    if (!turns.length) return;
    at = Math.max(0, Math.min(turns.length - 1, place));
    turns.forEach((turn, each) => {
      turn.node.classList.toggle("current", each === at);
      turn.link.classList.toggle("current", each === at);
      if (each === at) turn.link.setAttribute("aria-current", "true");
      else turn.link.removeAttribute("aria-current");
    });
    if (scroll) turns[at].node.scrollIntoView({ block: "start", behavior: "auto" });
    turns[at].link.scrollIntoView({ block: "nearest" });
  };
  turns.forEach((turn, place) => turn.link.addEventListener("click", () => go(place)));
  const other = (name) => (rollout[name] ? (location.hash = rolloutOf(name)) : say(`there is no rollout ${name === "before" ? "before" : "after"} this one${list ? " in the filtered list" : ""}`));
  if (params.has("turn")) setTimeout(() => go(turns.findIndex((turn) => String(turn.number) === params.get("turn"))));
  if (params.get("text")) setTimeout(() => showText(main, turns, params.get("text"), go));
  return {
    node: main,
    live: rollout.in_flight ? run : null,
    following: rollout.in_flight,
    keys: {
      j: ["next turn", () => go(at + 1)],
      k: ["previous turn", () => go(at - 1)],
      g: ["first turn", () => go(0)],
      G: ["last turn", () => go(turns.length - 1)],
      o: ["open or fold the long texts of this turn", () => at >= 0 && turns[at].node.querySelectorAll(".block").forEach((each) => each.toggle && each.toggle())],
      r: ["open or fold the reasoning", () => main.querySelectorAll("details.reasoning").forEach((each) => (each.open = !each.open))],
      n: ["next rollout", () => other("after")],
      p: ["previous rollout", () => other("before")],
      t: ["tokens", () => (rollout.tokens ? (location.hash = address("tokens", source)) : say("this rollout has no recorded tokens"))],
      s: ["compare with its siblings", () => (location.hash = siblingsAddress(rollout, run))],
      c: ["copy an address of this turn", () => copy(`${location.origin}${location.pathname}${address("rollout", { ...source, turn: at >= 0 ? turns[at].number : null })}`, "address copied")],
    },
  };
}

// The list from which the reader came, by its filter, its order and the rollout's place in it: the rollouts before and
// after, each with the parameters of its address. A list that changed meanwhile is read from its beginning.
async function listOf(params) {
  const [where, sort, id] = [params.get("where") || "", params.get("sort") || "", params.get("id")];
  if (!where && !sort) return null;
  const [key, order] = sort.split(" ");
  const ask = (offset, limit) => get("rollouts", { run: params.get("run"), where, sort: key, descending: order === "desc" ? "1" : "", offset, limit }).then((found) => found.rows, () => []);
  let first = Math.max(0, (Number.parseInt(params.get("at"), 10) || 0) - 1), rows = await ask(first, 3);
  if (!rows.some((row) => row.id === id)) [first, rows] = [0, await ask(0, 1000)];
  const place = rows.findIndex((row) => row.id === id);
  if (place < 0) return null;
  const found = { params: { where, sort }, name: "filtered list" };
  try {
    found.name = asText(JSON.parse(where || "[]")) || `sorted by ${key}`;
  } catch {
    // the server has read the filter, so only a file comes here
  }
  for (const [name, by] of [["before", -1], ["after", 1]]) if (rows[place + by]) found[name] = { id: rows[place + by].id, params: { where, sort, at: first + place + by } };
  return found;
}

// Opens what hides the first place with a text, and goes there.
function showText(main, turns, text, go) {
  const wanted = text.toLowerCase(), walk = document.createTreeWalker(main.querySelector(".thread"), NodeFilter.SHOW_TEXT);
  const whole = [...main.querySelectorAll(".thread pre, .thread code, .thread .leaf, .thread .block")];
  let node = null, at = -1;
  while (at < 0 && walk.nextNode()) [node, at] = [walk.currentNode, walk.currentNode.data.toLowerCase().indexOf(wanted)];
  const place = at >= 0 ? node.parentElement : whole.find((each) => each.textContent.toLowerCase().includes(wanted)); // colours split a text
  if (!place) return say("the text is in a part of the record that is not shown yet");
  const turn = turns.findIndex((each) => each.node.contains(place));
  if (turn >= 0) go(turn, false);
  for (let each = place; each && each !== main; each = each.parentElement) {
    if (each.matches("details")) each.open = true;
    if (each.matches(".block.folded")) each.toggle();
  }
  let shown = place;
  if (at >= 0) {
    const range = document.createRange();
    range.setStart(node, at);
    range.setEnd(node, Math.min(at + text.length, node.length));
    shown = h("mark.hit", {});
    range.surroundContents(shown);
  }
  shown.scrollIntoView({ block: "center" });
}

export function siblingsAddress(rollout, run) {
  const members = rollout.group.members.map(([id]) => id);
  const place = Math.max(0, members.indexOf(rollout.id));
  const first = Math.max(0, Math.min(place - 4, members.length - 8));
  return address("siblings", { run, id: members.slice(first, first + 8) });
}

function head(rollout, run, judged, rolloutOf, callouts) {
  const facts = [];
  const fact = (name, value, title = "") => value && facts.push(h("div.fact", title ? { title } : {}, h("dt", {}, name), h("dd", {}, value)));
  fact("reward", rewardTag(rollout.in_flight ? null : rollout.reward, rollout.in_flight ? null : rollout.outcome));
  if (rollout.official !== undefined && rollout.official !== null) fact(rollout.official_name || "official", rewardTag(rollout.official));
  gradeFacts(judged, fact);
  fact("outcome", rollout.outcome && h("span", { class: `o-text-${rollout.outcome}` }, rollout.outcome));
  fact("blame", rollout.blame);
  fact("turns", count((rollout.turns || []).length));
  if (rollout.prompt_tokens || rollout.completion_tokens) fact("tokens", `${count(rollout.prompt_tokens || 0)} read, ${count(rollout.completion_tokens || 0)} written`);
  if (rollout.cost) fact("cost", figure(rollout.cost));
  const beside = rollout.beside || {};
  fact("time", beside.duration_s ? seconds(beside.duration_s) : null, beside.started_at ? `started ${when(beside.started_at)}` : "");
  if (rollout.tool_calls_attempted) fact("calls", `${count(rollout.tool_calls_attempted)}${(rollout.tool_errors || []).length ? `, ${rollout.tool_errors.length} failed` : ""}`);
  if (rollout.tokens) fact("exact tokens", h("a", { href: address("tokens", { run, id: rollout.id }) }, `${count(rollout.tokens.rows.reduce((sum, row) => sum + row.tokens, 0))} in ${plural(rollout.tokens.rows.length, "row")}`));
  const group = rollout.group.members;
  const cells = group.length > 1 ? h("span.cells", {}, group.map((member) => cell(member, run, rollout.id))) : null;
  const reasons = [];
  if (rollout.in_flight) reasons.push(h("p.callout.is-info", {}, "This rollout is running. The page follows it."));
  if (rollout.check?.breaks) reasons.push(h("div.callout.is-bad", {}, h("b", {}, "The check fails over this work: "), h("code.output", {}, rollout.check.breaks)));
  if (rollout.difference) reasons.push(h("p.callout.is-warn", {}, h("b", {}, "The reward differs from the official verdict. "), rollout.difference));
  if (rollout.error) reasons.push(h("div.callout.is-bad", {}, h("b", {}, rollout.blame ? `Failed (${rollout.blame}). ` : "Failed. "), block(rollout.error)));
  else if (rollout.outcome && rollout.outcome !== "natural") reasons.push(h("p.callout.is-warn", {}, (rollout.outcome === "max_turns" && rollout.most_turns ? `It reached the limit of ${plural(rollout.most_turns, "turn")} before the model ended.` : OUTCOMES[rollout.outcome]) || `It ended with ${rollout.outcome}.`));
  for (const label of rollout.labels || []) reasons.push(h("p.callout.is-warn", {}, h("b", {}, `${label.name}${label.certain ? " (certain)" : ""} `), label.evidence));
  reasons.push(...reasonsOf(rollout, (turn, words) => h("a", { href: address("rollout", { run, id: rollout.id, turn }), onclick: (event) => {
    event.preventDefault();
    document.querySelector(turn === null ? "section.r-end" : `section[aria-label="turn ${Number(turn)}"]`)?.scrollIntoView();
  } }, words), (other) => h("a", { href: address("siblings", { run, id: [other, rollout.id], reference: other }) }, "compare")));
  for (const each of rollout.attempts || []) reasons.push(h("p.callout", {}, `An earlier attempt was discarded: ${each.outcome}. ${each.error}`));
  if (rollout.parent) reasons.push(h("p.callout.is-info", {}, "It continues ", h("a", { href: address("rollout", { run, id: `${rollout.group_id}/${rollout.parent.index}` }) }, `rollout #${rollout.parent.index}`), ` after turn ${rollout.parent.turn}.`));
  return h("section.head", { "aria-label": "The rollout" },
    h("div.title", {}, h("h1", {}, rollout.task_id || rollout.id, h("span.dim", {}, ` #${rollout.index}`)), cells,
      h("span.actions", {},
        rollout.before ? h("a.button", { href: rolloutOf("before"), title: "previous rollout (p)" }, "‹ previous") : null,
        rollout.after ? h("a.button", { href: rolloutOf("after"), title: "next rollout (n)" }, "next ›") : null,
        group.length > 1 ? h("a.button", { href: siblingsAddress(rollout, run), title: "compare with its siblings (s)" }, "siblings") : null,
        rollout.tokens ? h("a.button", { href: address("tokens", { run, id: rollout.id }), title: "exact tokens (t)" }, "tokens") : null,
        rollout.commands ? commandsMenu(rollout.commands) : null)),
    h("dl.facts", {}, facts), callouts, reasons, timeBar(rollout), numbers(rollout));
}

const OUTCOMES = {
  max_turns: "It reached the limit of turns before the model ended.",
  length: "A reply or the context reached its length limit.",
  budget: "It used up its budget.",
  cancelled: "It was cancelled.",
  api_error: "The model server failed. This rollout has no score of the model's own making.",
  infra_error: "The infrastructure failed. This rollout is not scored.",
};

function commandsMenu(commands) {
  return h("details.menu", {}, h("summary.button", {}, "copy as"),
    h("div.items", {}, Object.entries(commands).map(([what, command]) => h("button", { type: "button", onclick: () => copy(command, "command copied") }, h("span", {}, what), h("code", {}, command)))));
}

export function cell([id, position, reward, outcome, official, labelled], run, current = "") {
  const verdict = outcome === null ? "flying" : reward === null ? "unscored" : "scored";
  const share = verdict === "scored" ? Math.max(0, Math.min(1, reward)) : 0;
  const differs = official !== null && official !== undefined && official !== reward;
  const name = `#${position}: ${verdict === "scored" ? figure(reward, 2) : verdict === "flying" ? "running" : `unscored, ${outcome}`}${differs ? `, official ${figure(official, 2)}` : ""}${labelled ? ", labelled" : ""}`;
  return h("a.cell", { href: address("rollout", { run, id }), class: `is-${verdict}${share >= 1 ? " is-full" : share <= 0 && verdict === "scored" ? " is-zero" : ""}${differs ? " differs" : ""}${labelled ? " labelled" : ""}${id === current ? " current" : ""}`, title: name, "aria-label": name, style: { "--share": `${share * 100}%` } });
}

function timeBar(rollout) {
  const beside = rollout.beside || {};
  const stages = { ...(beside.stages || {}) };
  const turn_s = beside.turn_s || [];
  const model = turn_s.reduce((sum, [model]) => sum + model, 0);
  if (turn_s.length) stages.model = model;
  if ("agent" in stages) stages.agent = Math.max(0, stages.agent - (stages.model || 0) - (stages.tool || 0) - (stages.user || 0));
  const names = [...STAGES.filter((name) => name in stages), ...Object.keys(stages).filter((name) => !STAGES.includes(name))].filter((name) => stages[name] > 0);
  const total = names.reduce((sum, name) => sum + stages[name], 0);
  if (!total) return null;
  const title = names.map((name) => `${name} ${seconds(stages[name])}`).join(", ");
  return h("div.time", { role: "img", "aria-label": plain(`time: ${title}`) },
    h("div.bar", {}, names.map((name) => h("i", { class: `s-${STAGES.includes(name) ? name : "other"}`, title: `${name}: ${seconds(stages[name])}`, style: { width: `${(100 * stages[name]) / total}%` } }))),
    h("div.legend", {}, names.map((name) => h("span", {}, h("i", { class: `s-${STAGES.includes(name) ? name : "other"}` }), `${name === "agent" ? "agent's own" : name} ${seconds(stages[name])}`))));
}

function numbers(rollout) {
  const entries = Object.entries(rollout.metrics || {});
  return entries.length ? h("div.criteria", { "aria-label": "Criteria" }, entries.map(([name, value]) => h("span.criterion", {}, h("span", {}, name), h("b", {}, figure(value))))) : null;
}

function conversation(rollout, source) {
  const messages = rollout.messages || [];
  const turns = [];
  const count = messages.filter((message) => message.role === "assistant").length;
  let own = (rollout.turns || []).length - count, waiting = new Map();
  const longest = Math.max(...(rollout.beside?.turn_s || []).map(([model, tool]) => model + tool), 0.001);
  for (const message of messages) {
    if (message.role === "tool" || message.role === "function") {
      const place = waiting.get(word(message.tool_call_id));
      const shown = result(message.content, source);
      if (place) {
        waiting.delete(word(message.tool_call_id));
        place.append(shown.node);
        if (shown.failed) place.closest(".call").classList.add("failed");
        if (shown.failed && turns.length) turns[turns.length - 1].failed = true;
      } else turns.push(step("tool", null, [shown.node], "tool result"));
      continue;
    }
    const body = [];
    const { text, thoughts } = parts(message);
    for (const thought of thoughts) body.push(h("details.reasoning", {}, h("summary", {}, `reasoning · ${plain(start(thought)).trim().slice(0, 90).replace(/\s+/g, " ")}`), block(thought, { kind: "markdown", source })));
    if (text !== "" && text !== null && text !== undefined) body.push(...content(text, { kind: message.role === "tool" ? "ansi" : "markdown", source, folded: message.role === "system" ? true : null }));
    const names = [];
    if (message.role === "assistant") waiting = new Map();
    const calls = message.tool_calls || [];
    if (!Array.isArray(calls)) body.push(tree(calls, source)); // not a list of calls
    for (const request of Array.isArray(calls) ? calls : []) {
      const fn = (request && request.function) || {};
      names.push(word(fn.name));
      const results = h("div.result", {});
      waiting.set(word(request && request.id), results);
      const line = oneLine(fn.arguments);
      body.push(h("div.call", {}, h("div.call-head", {}, h("span.tool", {}, word(fn.name)), line), line && line.whole ? null : args(fn.arguments, source), results));
    }
    const number = message.role === "assistant" && own >= 0 && own < (rollout.turns || []).length ? own : null;
    if (message.role === "assistant") own++;
    const changed = number === null ? [] : rollout.state_changes?.[rollout.turns[number].number] || [];
    if (changed.length) body.push(stateChanges(changed));
    const turn = number === null ? null : { ...rollout.turns[number], seconds: (rollout.beside?.turn_s || [])[number], longest };
    turns.push(step(word(message.role), turn, body, names.join(", ") || plain(start(typeof text === "string" || (text && text.$cut) ? text : "")).trim().slice(0, 60)));
  }
  const inside = [...(rollout.inner_calls || []).map((call) => [`call of a program in turn ${call.turn}`, [h("div.call", {}, h("div.call-head", {}, h("span.tool", {}, call.tool)), args(call.arguments, source), h("div.result", {}, result(call.reply, source).node))], call.tool])];
  for (const each of everySubagent(rollout.subagents || [])) {
    inside.push([`sub-agent ${each.number}, started in turn ${each.turn}: ${each.outcome}`, [block(each.goal, { kind: "markdown", source }), ...conversation({ messages: each.messages, turns: [], beside: {} }, source).map((turn) => turn.node)], "sub-agent"]);
  }
  for (const [title, body, preview] of inside) turns.push(step(title, null, body, preview));
  return turns;
}

// What a turn changed in the environment's state.
function stateChanges(changes) {
  const row = ([path, before, after]) => h("div.leaf", {}, h("span.key", {}, path), " ", h("del", {}, before ?? "(none)"), " → ", h("ins", {}, after ?? "(removed)"));
  return h("details.state-values", {}, h("summary", {}, `state: ${plural(changes.length, "value")} changed`), changes.map(row));
}

function* everySubagent(list) {
  for (const each of list) {
    yield each;
    yield* everySubagent(each.subagents || []);
  }
}

// A name as text, whatever stands in its place.
const word = (value) => (typeof value === "string" ? value : JSON.stringify(value) ?? "undefined");

function parts(message) {
  const thoughts = ["reasoning_content", "reasoning"].map((key) => message[key]).filter((each, place, all) => each && all.indexOf(each) === place && (typeof each === "string" || each.$cut));
  let text = message.content;
  if (message.role === "assistant" && typeof text === "string" && text.includes("<think>")) {
    for (const found of text.matchAll(THINK)) if (found[1].trim()) thoughts.push(found[1]);
    text = text.replace(THINK, "");
  }
  return { text, thoughts };
}

function step(role, turn, body, preview) {
  const label = turn ? `turn ${turn.number}` : role;
  const notes = turn ? [turn.finish_reason, turn.prompt_tokens ? `${count(turn.prompt_tokens)} → ${count(turn.completion_tokens)} tokens` : null, turn.seconds ? `model ${seconds(turn.seconds[0])}` : null, turn.seconds && turn.seconds[1] ? `tools ${seconds(turn.seconds[1])}` : null].filter(Boolean).join(" · ") : "";
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "other";
  const node = h("section.turn", { class: `r-${known}`, "aria-label": label }, h("header", {}, h("span.role", {}, turn ? "assistant" : role), turn ? h("span.number", {}, `turn ${turn.number}`) : null, h("span.notes", {}, notes)), body);
  const anchor = h("button.step", { type: "button", class: `r-${known}` });
  return {
    node, link: anchor, failed: false, number: turn ? turn.number : null,
    entry() {
      add(anchor, [h("span.n", {}, turn ? String(turn.number) : role[0]), h("span.what", {}, preview || role), turn && turn.seconds ? h("span.mini", { title: notes }, h("i.s-model", { style: { width: `${(100 * turn.seconds[0]) / turn.longest}%` } }), h("i.s-tool", { style: { width: `${(100 * turn.seconds[1]) / turn.longest}%` } })) : null]);
      anchor.classList.toggle("failed", this.failed);
      return anchor;
    },
  };
}

const BLOCKS = new Set(["command", "content", "patch", "output", "code", "old_string", "new_string", "stdout", "stderr", "script", "text", "diff", "model_patch", "agent_patch"]);

function parsed(text) {
  if (text !== null && typeof text === "object" && !text.$cut) return text;
  if (typeof text !== "string") return null;
  try {
    const value = JSON.parse(text);
    return value !== null && typeof value === "object" ? value : null;
  } catch {
    return null;
  }
}

function oneLine(value) {
  const found = parsed(value);
  if (!found || Array.isArray(found)) return null;
  const main = found.command ?? found.code ?? found.path ?? found.query ?? found.url;
  if (typeof main !== "string") return null;
  const node = h("code.line", { title: plain(main.slice(0, 2000)) }, clipped(main.replace(/\s+/g, " "), 160));
  node.whole = Object.keys(found).length === 1 && main.length <= 110 && !main.includes("\n");
  return node;
}

function args(value, source) {
  const found = parsed(value);
  if (found === null) {
    const text = start(value);
    return text.trim() === "" ? null : h("div.args.malformed", {}, h("p.note", {}, "The arguments are not a JSON object."), block(value, { source }));
  }
  return fields(found, source, "args");
}

function fields(object, source, name) {
  if (Array.isArray(object)) return h(`div.${name}`, {}, tree(object, source));
  const inline = [], blocks = [];
  const isolation = { rung: "isolation" };
  for (const [key, value] of Object.entries(object)) {
    if (isTests(value)) blocks.push(tests(key, value));
    else if (value !== null && typeof value === "object" && !value.$cut) blocks.push(h("div.field", {}, h("span.key", {}, key), tree(value, source)));
    else if (typeof value === "string" && (BLOCKS.has(key) || value.includes("\n") || value.length > 100)) value === "" ? inline.push(h("span.pair.dim", {}, `${key} (empty)`)) : blocks.push(block(value, { source, name: key, caption: key === "output" || key === "command" ? "" : key }));
    else if (value !== null && typeof value === "object") blocks.push(block(value, { source, name: key, caption: key }));
    else inline.push(h("span.pair", {}, h("span.key", {}, isolation[key] || key), " ", h("span.value", {}, value === "" ? "(empty)" : String(value))));
  }
  return h(`div.${name}`, {}, inline.length ? h("div.inline", {}, inline) : null, blocks);
}

// What failed comes first.
function tests(name, results) {
  const entries = Object.entries(results).map(([test, each]) => [test, passed(each), typeof each === "string" ? each : each ? "passed" : "failed"]);
  const bad = entries.filter(([, good]) => !good), good = entries.filter(([, good]) => good);
  const list = (found) => h("ul.tests", {}, found.map(([test, passed, word]) => h("li", { class: passed ? "good" : "bad" }, passed ? "✓ " : "✕ ", h("code", {}, test), word === "passed" || word === "failed" ? null : h("span.dim", {}, ` ${word}`))));
  return h("div.field", {}, h("span.key", {}, `${name}: ${bad.length ? `${count(bad.length)} of ${count(entries.length)} failed` : `all ${count(entries.length)} passed`}`), bad.length ? list(bad) : null,
    good.length > 12 ? h("details", {}, h("summary", {}, `${count(good.length)} passed`), list(good)) : good.length ? list(good) : null);
}

function result(value, source) {
  const found = parsed(value);
  if (found === null || Array.isArray(found)) {
    const text = Array.isArray(value) ? value : value === "" || value === null || value === undefined ? "(no output)" : value;
    return { node: h("div.fields", {}, content(text, { source })), failed: false };
  }
  const { exit_code, error, ...others } = found;
  const coded = Number.isInteger(exit_code), failed = Boolean(error) || (coded && exit_code !== 0);
  return {
    failed,
    node: h("div.fields", {},
      coded && exit_code !== 0 ? h("span.exit", {}, `exit code ${exit_code}`) : null,
      error ? h("div.error", {}, typeof error === "string" || error.$cut ? block(error, { source }) : tree(error, source)) : null,
      fields(others, source, "values")),
  };
}

// What the check found: tests that failed, the final patch, and all other evidence.
function endings(rollout, source) {
  const detail = Object.entries(rollout.detail || {}).filter(([name, value]) => name !== "difference" && value !== null && value !== "" && !(typeof value === "object" && !value.$cut && Object.keys(value).length === 0));
  const sections = [];
  const patches = detail.filter(([name, value]) => /patch|diff/.test(name) && isDiff(start(value), name));
  for (const [name, value] of patches) sections.push(h("section.turn.r-end", { "aria-label": name }, h("header", {}, h("span.role", {}, name === "patch" ? "final changes" : name), h("span.notes", {}, changes(start(value)))), block(value, { source, name })));
  const rest = Object.fromEntries(detail.filter(([name]) => !patches.some(([each]) => each === name)));
  if (Object.keys(rest).length) sections.unshift(h("section.turn.r-end", { "aria-label": "Grading" }, h("header", {}, h("span.role", {}, "grading")), fields(rest, source, "values")));
  if (rollout.state && Object.keys(rollout.state).length) sections.push(h("section.turn.r-end", { "aria-label": "State" }, h("header", {}, h("span.role", {}, rollout.in_flight ? "state so far" : "state at the end")), h("details.state-values", {}, h("summary", {}, plural(Object.keys(rollout.state).length, "value")), fields(rollout.state, source, "values"))));
  const beside = rollout.beside?.sandbox || {};
  if (Object.keys(beside).length) sections.push(h("section.turn.r-end", { "aria-label": "Sandbox" }, h("header", {}, h("span.role", {}, "sandbox")), fields(beside, source, "values")));
  if ((rollout.tools || []).length) sections.push(h("section.turn.r-end", { "aria-label": "Tools" }, h("header", {}, h("span.role", {}, "tools of the model"), h("span.notes", {}, plural(rollout.tools.length, "tool"))), h("details.tree", {}, h("summary", {}, rollout.tools.map((tool) => word((tool?.function || tool)?.name)).join(", ")), rollout.tools.map((tool) => tree(tool?.function || tool, source, word((tool?.function || tool)?.name), 1)))));
  return sections;
}

function changes(text) {
  const lines = text.split("\n");
  return `+${lines.filter((line) => line.startsWith("+") && !line.startsWith("+++")).length} −${lines.filter((line) => line.startsWith("-") && !line.startsWith("---")).length}`;
}
