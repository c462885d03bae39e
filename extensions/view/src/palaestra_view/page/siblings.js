// Rollouts of one group side by side: where they part, in calls and in tokens, and what differs in their results.

import { h, add, chip, count, short, figure, seconds, rewardTag, address, plain, plural, say, clipped, oneLine } from "./dom.js";
import { get, getKept } from "./api.js";
import { unpack, face, heat } from "./tokens.js";

const MOST = 16;

export async function show(params, shell) {
  const run = params.get("run"), ids = params.getAll("id").slice(0, MOST);
  const group = ids[0].slice(0, ids[0].lastIndexOf("/"));
  const found = await get("siblings", { run, id: ids, reference: params.get("reference") });
  const { rows } = await get("rollouts", { run, where: JSON.stringify([["group", "=", group]]), limit: 1000 });
  const byId = new Map(rows.map((row) => [row.id, row]));
  const shown = found.rollouts, reference = found.reference;
  const task = (byId.get(reference) || {}).task || group;
  shell.title(`siblings of ${task}`, [["runs", "#/runs"], [run, address("run", { run })], [task, address("run", { run, where: JSON.stringify([["group", "=", group]]) })], ["siblings", null]]);
  const number = (id) => `#${id.slice(id.lastIndexOf("/") + 1)}`;
  const row = (id) => byId.get(id) || { reward: null, outcome: "", metrics: {}, labels: [] };
  const passed = shown.filter((each) => (row(each.id).reward ?? 0) >= 1);

  const chosen = new Set(ids);
  const pick = h("fieldset.pick", {}, h("legend", {}, "rollouts"), rows.map((each) => {
    const box = h("input", { type: "checkbox", checked: chosen.has(each.id), onchange: () => {
      box.checked ? chosen.add(each.id) : chosen.delete(each.id);
      if (chosen.size >= 2 && chosen.size <= MOST) location.hash = address("siblings", { run, id: rows.filter((row) => chosen.has(row.id)).map((row) => row.id), reference });
      else say(`choose 2 to ${MOST} rollouts`);
    } });
    return h("label", {}, box, number(each.id), " ", rewardTag(each.reward, each.outcome));
  }));

  const columns = shown.map((each) => each.id);
  const line = (label, make, title = "") => h("tr", {}, h("th", { scope: "row", title: title || null }, label), shown.map((each, place) => h("td", { class: each.id === reference ? "reference" : "" }, make(each, row(each.id), place))));
  const names = [...new Set(shown.flatMap((each) => Object.keys(each.tools)))];
  const table = h("div.scroll", {}, h("table.siblings", {}, h("thead", {}, h("tr", {}, h("th", {}, ""), shown.map((each) => h("th", { scope: "col", class: each.id === reference ? "reference" : "" }, h("a", { href: address("rollout", { run, id: each.id }) }, number(each.id)), each.id === reference ? h("div.small.dim", {}, "reference") : h("div", {}, h("button.quiet.small", { type: "button", onclick: () => (location.hash = address("siblings", { run, id: columns, reference: each.id })) }, "use as reference")))))),
    h("tbody", {},
      line("reward", (each, row) => rewardTag(row.reward, row.outcome)),
      rows.some((each) => each.official !== null) ? line("official", (each, row) => (row.official === null ? "" : rewardTag(row.official))) : null,
      line("outcome", (each, row) => h("span", { class: `o-text-${row.outcome}` }, row.outcome)),
      rows.some((each) => each.labels.length) ? line("labels", (each, row) => row.labels.join(", ")) : null,
      line("turns", (each, row) => count(row.turns)), line("tokens", (each, row) => short(row.prompt_tokens + row.completion_tokens)), line("time", (each, row) => seconds(row.seconds)),
      line("first other token", (each) => (each.id === reference ? "" : each.token ? h("a", { href: "#token", onclick: (event) => { event.preventDefault(); tokensAt(each); } }, `at ${count(each.token.index)}${each.token.turn ? `, turn ${each.token.turn}` : ""}`) : row(each.id).exact ? "none" : h("span.dim", {}, "no tokens")), "the first position at which the tokens differ from the reference"),
      line("first other call", (each) => (each.id === reference ? "" : each.call === null ? "none" : `call ${each.call + 1}`), "the first tool call with another name or other arguments"),
      names.map((name) => line(name, (each) => (each.tools[name] ? count(each.tools[name]) : h("span.dim", {}, "0")), "calls of this tool")),
      Object.entries(found.criteria).map(([name, values]) => line(name, (each, row, place) => figure(values[place] ?? null))),
      Object.entries(found.tests).slice(0, 60).map(([name, values]) => line(h("code.small", {}, name), (each, row, place) => (values[place] ? h("span", { class: values[place] === "passed" ? "good" : values[place] === "failed" ? "bad" : "dim" }, values[place]) : ""))))));

  const token = h("section.card", { id: "token", "aria-label": "The first differing token" });
  async function tokensAt(each, scroll = true) {
    token.replaceChildren(h("p.note", {}, "loading the tokens …"));
    try {
      const pair = await Promise.all([reference, each.id].map((id) => getKept("tokens", { run, id, row: 0 })));
      const index = each.token.index;
      token.replaceChildren();
      add(token, [h("h2", {}, `Token ${count(index)}: ${number(each.id)} parts from ${number(reference)}`),
        pair.map((record, place) => {
          const { ids, mask, logprobs, texts } = unpack(record), id = [reference, each.id][place];
          const nodes = [];
          for (let at = Math.max(0, index - 24); at < Math.min(ids.length, index + 40); at++) {
            const sampled = logprobs && logprobs[at] <= 0.01;
            nodes.push(h("span.token", { class: `${sampled ? `heat${heat(logprobs[at])}` : "given"} ${mask[at] ? "trained" : ""} ${at === index ? "focus" : at > index ? "after" : ""}`, title: `${at}: id ${ids[at]}${sampled ? `, log-probability ${logprobs[at].toFixed(3)}` : ", not sampled"}` }, face(ids[at], texts)));
          }
          if (index >= ids.length) nodes.push(h("span.dim", {}, " (ends here)"));
          return h("div.token-pair", {}, h("a.who", { href: address("tokens", { run, id, at: Math.min(index, ids.length - 1) }) }, number(id), " ", rewardTag(row(id).reward, row(id).outcome)), h("div.token-wrap", { class: texts ? "" : "ids" }, nodes));
        })]);
      if (scroll) token.scrollIntoView({ block: "nearest" });
    } catch (error) {
      token.replaceChildren(h("p.note", {}, error.message));
    }
  }

  const longest = Math.max(...shown.map((each) => each.calls.length));
  const base = shown.find((each) => each.id === reference);
  const calls = h("div.scroll", {}, h("table.calls", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "call"), shown.map((each) => h("th", { scope: "col", class: each.id === reference ? "reference" : "" }, number(each.id), " ", rewardTag(row(each.id).reward, row(each.id).outcome))))),
    h("tbody", {}, Array.from({ length: Math.min(longest, 200) }, (_, place) => h("tr", {}, h("th", { scope: "row" }, String(place + 1)), shown.map((each) => {
      const call = each.calls[place], same = base.calls[place];
      if (!call) return h("td.none", { class: each.call === place ? "parts" : "" }, each.calls.length === place ? h("span.dim", {}, "ended") : "");
      const equal = same && call[1] === same[1] && call[2] === same[2];
      return h("td", { class: `${each.id === reference ? "reference" : equal && (each.call === null || place < each.call) ? "same" : ""} ${each.call === place ? "parts" : ""}` }, h("a.tool", { href: address("rollout", { run, id: each.id, turn: call[0] }) }, call[1]), h("code", { title: plain(call[2]) }, argument(call[2])));
    }))))));

  const first = shown.find((each) => each.token);
  if (first) tokensAt(shown.find((each) => each.token && passed.length && (row(each.id).reward ?? 0) < 1) || first, false);
  return {
    node: h("div.siblings-view", {}, h("section.head", {}, h("h1", {}, task, h("span.dim", {}, ` ${plural(shown.length, "sibling")}`)), pick, branches(rows, run, number), h("div.why", {}, why(shown, found, row, number))), table, first ? token : null,
      h("h2", {}, "Calls, one below the other"), h("p.note", {}, "Equal calls are dim. The first call in which a rollout differs from the reference is marked."), calls),
    keys: {},
  };
}

// A group whose rollouts continue one another, as a tree. A parent that is missing, or a circle, makes no branch.
function branches(rows, run, number) {
  if (!rows.some((row) => row.parent !== null)) return null;
  const below = new Map(), seen = new Set();
  for (const row of rows) below.set(row.parent, [...(below.get(row.parent) || []), row]);
  const list = (found) => h("ul", {}, found.filter((row) => !seen.has(row.id)).map((row) => {
    seen.add(row.id);
    const under = below.get(row.position) || [];
    return h("li", {}, h("a", { href: address("rollout", { run, id: row.id }) }, number(row.id)), " ", rewardTag(row.reward, row.outcome), under.length ? list(under) : null);
  }));
  const tree = list(below.get(null) || []);
  for (const row of rows) if (!seen.has(row.id)) tree.append(...list([row]).childNodes);
  return h("section.branches", { "aria-label": "Which rollout continues which" }, tree);
}

export function argument(text) {
  try {
    const value = JSON.parse(text);
    const main = value.command ?? value.code ?? value.path ?? value.query;
    if (typeof main === "string") return clipped(main, 300);
  } catch {
    return clipped(text, 300);
  }
  return clipped(text, 300);
}

const named = (call) => [`${call[1]} `, h("code", {}, clipped(oneLine(argument(call[2])), 70))];

// One sentence for each rollout that ended differently from the reference.
function why(shown, found, row, number) {
  const reference = found.reference, best = row(reference);
  const base = shown.find((each) => each.id === reference);
  const scored = shown.filter((each) => row(each.id).reward !== null && row(each.id).reward !== undefined);
  const lines = [h("p", {}, `${scored.filter((each) => row(each.id).reward >= 1).length} of ${scored.length} scored rollouts reach the full reward. ${number(reference)}, the reference, has ${figure(best.reward, 2)}.`)];
  for (const each of shown) {
    if (each.id === reference || row(each.id).reward === best.reward) continue;
    const parts = [];
    if (each.token) parts.push(`the tokens part at ${count(each.token.index)}${each.token.turn ? ` (turn ${each.token.turn})` : ""}`);
    if (each.call !== null && each.call !== undefined) {
      const [one, two] = [base.calls[each.call], each.calls[each.call]];
      parts.push([`call ${each.call + 1} is `, two ? named(two) : "missing", " instead of ", one ? named(one) : "no call"]);
    }
    const place = shown.indexOf(each), at = shown.indexOf(base);
    const tests = Object.entries(found.tests).filter(([, values]) => values[place] !== values[at]).map(([name]) => name);
    if (tests.length) parts.push(`${plural(tests.length, "test")} ${tests.length === 1 ? "ends" : "end"} differently, first ${tests[0]}`);
    if (row(each.id).outcome !== best.outcome) parts.push(`it ended with ${row(each.id).outcome}`);
    lines.push(h("p", {}, h("b", {}, `${number(each.id)} (${row(each.id).reward === null ? "unscored" : figure(row(each.id).reward, 2)}): `), parts.length ? parts.map((part, place) => [place ? "; " : "", part]) : "no difference was found", "."));
  }
  return lines;
}
