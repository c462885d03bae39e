// One run: its figures, and its rollouts as a list, as groups, as training curves, and its settings.

import { h, add, chip, count, short, figure, seconds, when, strip, rewardTag, address, plural, say, plain } from "./dom.js";
import { get, query, isFile } from "./api.js";
import { parse, asText, FIELDS } from "./filter.js";
import { cell } from "./rollout.js";
import { state, OUTCOMES } from "./runs.js";
import { charts } from "./charts.js";
import { originOfRun } from "./forks.js";
import { judgedRun, judgedColumns } from "./judgement.js";
import { tree } from "./text.js";
import { notes, scores } from "./overview.js";

const PAGE = 200, ROW = 28;

export async function show(params, shell) {
  const run = params.get("run");
  const found = await get("run", { run });
  const { summary } = found;
  shell.title(summary.env || run, [["runs", "#/runs"], [run, null]]);
  let where = [];
  try {
    where = JSON.parse(params.get("where") || "[]");
  } catch {
    say("the filter in the address cannot be read");
  }
  const tabs = [["rollouts", "Rollouts"], ["groups", "Groups"], ["scores", "Scores"], ...(found.training.length ? [["training", "Training"]] : []), ...(found.nodes.length ? [["nodes", "Nodes"]] : []), ["settings", "Settings"]];
  const tab = tabs.some(([name]) => name === params.get("tab")) ? params.get("tab") : "rollouts";
  const go = (changes) => (location.hash = address("run", { run, tab, where: where.length ? JSON.stringify(where) : "", sort: params.get("sort"), ...changes }));
  const body = h("div.body", {});
  const bar = h("nav.tabs", { "aria-label": "Views of this run" }, tabs.map(([name, label]) => h("a", { href: address("run", { run, tab: name, where: tab === "rollouts" || name === "rollouts" ? params.get("where") : "" }), "aria-current": name === tab ? "page" : null }, label)));
  const view = { rollouts, groups, scores, training, nodes, settings }[tab];
  const shown = await view({ run, found, where, go, body, params });
  return {
    node: h("div.run", {}, facts(summary, run, go, found.training), originOfRun(found.fork), judgedRun(found.judged, (condition) => go({ tab: "rollouts", where: JSON.stringify([condition]) })), notes(found, run), bar, body),
    live: run,
    following: summary.state === "running",
    keys: { 1: ["rollouts", () => go({ tab: "rollouts" })], 2: ["groups", () => go({ tab: "groups" })], ...(shown || {}) },
  };
}

function facts(run, name, go, training) {
  const only = (condition) => () => go({ tab: "rollouts", where: JSON.stringify([condition]) });
  const fact = (label, ...value) => h("div.fact", {}, h("dt", {}, label), h("dd", {}, value));
  const interval = (each) => (each.interval ? h("span.dim.small", {}, ` ${figure(each.interval[0], 2)}–${figure(each.interval[1], 2)}`) : null);
  const totals = run.totals;
  return h("section.head", { "aria-label": "The run" },
    h("div.title", {}, h("h1", {}, run.env || name, h("span.dim", {}, ` ${run.model}`)), h("span", {}, state(run))),
    h("dl.facts", {},
      training.length ? trained(training, fact) : null,
      training.length ? fact("reward over all steps", figure(run.reward.mean), h("div.small.dim", {}, "the weights changed meanwhile")) : fact("reward", h("b.big", {}, figure(run.reward.mean)), interval(run.reward), strip(run.reward.mean, run.reward.interval)),
      run.official ? fact(run.official_name, h(training.length ? "b" : "b.big", {}, figure(run.official.mean)), interval(run.official), run.differs ? h("div", {}, chip(`${count(run.differs)} differ from the reward`, "warn", { onclick: only(["differs", "=", 1]) })) : null) : null,
      (Object.keys(run.pass).length > 1 ? [Object.entries(run.pass)[0], Object.entries(run.pass).at(-1)] : []).map(([k, each]) => fact(k, figure(each.mean), interval(each), each.tasks < run.tasks ? h("div.small.warn", { title: "the other tasks have too few scored rollouts" }, `only ${count(each.tasks)} of ${plural(run.tasks, "task")}`) : null)),
      fact("scored", count(run.scored), h("span.dim", {}, ` of ${count(run.planned)}`), run.asked_again ? h("div.small.dim", { title: "an earlier attempt failed at the model server or was ended by its content filter" }, `${count(run.asked_again)} asked again`) : null),
      fact("groups", count(run.groups.ended), h("span.dim", {}, ` of ${count(run.groups.begun)}`), run.groups.dull ? h("div.small.dim", { title: "groups whose rewards are all equal: a policy gradient learns nothing from them; for an evaluation this means nothing" }, `${count(run.groups.dull)} with equal rewards`) : null, run.groups.failed ? h("div.small.warn", {}, `${count(run.groups.failed)} failed`) : null),
      fact("tokens", short(totals.prompt_tokens || 0), h("span.dim", {}, " read, "), short(totals.completion_tokens || 0), h("span.dim", {}, " written")),
      totals.cost !== null && totals.cost !== undefined ? fact("cost", figure(totals.cost, 4)) : null,
      fact("mean rollout", seconds(totals.seconds ? totals.seconds / totals.rollouts : null), totals.seconds && totals.model_s !== null ? h("div.small.dim", {}, `model ${Math.round((100 * totals.model_s) / totals.seconds)}%, tools ${Math.round((100 * totals.tool_s) / totals.seconds)}%`) : null),
      fact("started", when(run.started_at))),
    h("div.chips", {},
      run.reward.mean !== null && run.reward.mean < 1 ? chip("below full reward", "", { onclick: only(["reward", "<", 1]), title: "the rollouts with a reward below 1" }) : null,
      Object.entries(run.outcomes).sort(([a], [b]) => OUTCOMES.indexOf(a) - OUTCOMES.indexOf(b)).map(([name, n]) => chip(`${name} ${count(n)}`, `o-chip-${OUTCOMES.includes(name) ? name : "other"}`, { onclick: only(["outcome", "=", name]) })),
      Object.entries(run.blame).map(([name, n]) => chip(`blame: ${name} ${count(n)}`, "", { onclick: only(["blame", "=", name]), title: "rollouts that did not end naturally, by what ended them; those without a reward are in no mean" })),
      Object.entries(run.labels).map(([name, n]) => chip(`${name} ${count(n)}`, "warn", { onclick: only(["label", "=", name]), title: "a label: a sign of reward hacking that the check noticed" }))),
    Object.keys(run.criteria).length ? h("div.criteria", {}, Object.entries(run.criteria).map(([name, value]) => h("span.criterion", {}, h("span", {}, name), h("b", {}, figure(value))))) : null,
    run.mixed_scores ? h("p.callout.is-bad", {}, `Warning: ${run.mixed_scores}. \`palaestra grade\` gives all of them the scores of the present code.`) : null,
    run.damaged ? h("p.callout.is-bad", {}, `${plural(run.damaged, "record")} cannot be read and are left out.`) : null);
}

// A training run is judged by where it is now: its last held-out reward, and its latest steps.
function trained(lines, fact) {
  const points = (kind) => lines.filter((line) => line.kind === kind && Number.isFinite(line.reward));
  const steps = points("step").slice(-5), last = points("evaluation").pop();
  const mean = steps.reduce((sum, line) => sum + line.reward, 0) / (steps.length || 1);
  return [last ? fact(`held out, step ${last.step}`, h("b.big", {}, figure(last.reward))) : null,
    steps.length ? fact(steps.length > 1 ? `training, steps ${steps[0].step} to ${steps.at(-1).step}` : `training, step ${steps[0].step}`, h(last ? "b" : "b.big", {}, figure(mean))) : null];
}

async function rollouts({ run, found, where, go, body, params }) {
  const [key, order] = (params.get("sort") || "").split(" ");
  const ask = (offset, signal) => get("rollouts", { run, where: where.length ? JSON.stringify(where) : "", sort: key, descending: order === "desc" ? "1" : "", offset, limit: PAGE }, signal);
  const problem = h("div", { role: "alert" });
  const tell = (text) => problem.replaceChildren(...(text ? [h("p.callout.is-bad", {}, text)] : []));
  const first = await ask(0).catch((error) => (where.length || key ? (tell(error.message), null) : Promise.reject(error))) || { total: 0, rows: [] };
  const judged = found.summary.official !== null, labelled = Object.keys(found.summary.labels).length > 0;
  const criteria = Object.keys(found.summary.criteria).slice(0, 2);
  const input = h("input", { type: "search", placeholder: "filter: reward<1 outcome:max_turns task:words", "aria-label": "Filter rollouts", title: `fields: ${[...FIELDS, ...Object.keys(found.summary.criteria)].join(", ")}; differs; other words are searched in task, error and answer`, list: "fields" });
  input.value = asText(where);
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter") return;
    const { where: wanted, problems } = parse(input.value, Object.keys(found.summary.criteria));
    tell(problems.join("; "));
    if (!problems.length) go({ where: wanted.length ? JSON.stringify(wanted) : "" });
  });
  input.addEventListener("search", () => input.value === "" && where.length && go({ where: "" }));
  const searchBox = h("input", { type: "search", placeholder: "search in all text", "aria-label": "Search in the conversations" });
  searchBox.value = params.get("text") || "";
  searchBox.addEventListener("keydown", (event) => event.key === "Enter" && go({ text: searchBox.value }));
  const columns = [
    ["task", "task", "minmax(9em, 1.3fr)", (row) => [h("span.dim", {}, row.category ? `${row.category} · ` : ""), row.task]],
    ["#", "index", "3em", (row) => String(row.position)],
    ["reward", "reward", "5em", (row) => rewardTag(row.reward, row.outcome)],
    ...judgedColumns(found.judged),
    ...(judged ? [["official", "official", "5em", (row) => (row.official === null ? "" : rewardTag(row.official))]] : []),
    ["outcome", "outcome", "minmax(6.5em, 10em)", (row) => [h("span", { class: `o-text-${row.outcome}` }, row.outcome), row.blame && row.outcome !== "natural" ? h("span.dim", {}, ` ${row.blame}`) : null]],
    ...(labelled ? [["labels", "label", "minmax(5em, 8em)", (row) => row.labels.join(", ")]] : []),
    ...criteria.map((name) => [name, `metric.${name}`, "6em", (row) => figure(row.metrics[name] ?? null, 2)]),
    ["turns", "turns", "4em", (row) => count(row.turns)],
    ["calls", "calls", "6em", (row) => [count(row.calls), row.errors ? h("span.bad", { title: "failed calls" }, ` ${row.errors}✕`) : null, row.exits ? h("span.dim", { title: "calls with a nonzero exit code" }, ` ${row.exits}≠0`) : null]],
    ["tokens", "tokens", "5em", (row) => short(row.prompt_tokens + row.completion_tokens)],
    ["time", "seconds", "5em", (row) => seconds(row.seconds)],
    ["last reply or error", "", "minmax(10em, 2fr)", (row) => h("span", { class: row.error ? "bad" : "dim" }, row.error || row.answer)],
  ];
  const template = columns.map(([, , width]) => width).join(" ");
  const sortTo = (field) => go({ sort: key === field ? (order === "desc" ? "" : `${field} desc`) : field });
  const heads = h("div.row.heads", { role: "row", style: { "grid-template-columns": template } }, columns.map(([label, field]) => h("span", { role: "columnheader", "aria-sort": key && key === field ? (order === "desc" ? "descending" : "ascending") : null }, field ? h("button", { type: "button", onclick: () => sortTo(field) }, label, key === field ? (order === "desc" ? " ↓" : " ↑") : "") : label)));
  const pages = new Map([[0, first.rows]]), asked = new Set([0]);
  const rowAt = (place) => (pages.get(Math.floor(place / PAGE)) || [])[place % PAGE];
  // The rollout's page goes on in this list: it gets the filter, the order and the place.
  const listed = where.length || key ? { where: where.length ? JSON.stringify(where) : "", sort: params.get("sort") } : null;
  const rolloutAt = (place) => address("rollout", { run, id: rowAt(place).id, ...(listed && { ...listed, at: place }) });
  let current = -1;
  const list = virtual(first.total, ROW, (place) => {
    const row = rowAt(place);
    if (!row) {
      const page = Math.floor(place / PAGE);
      if (!asked.has(page)) {
        asked.add(page);
        ask(page * PAGE).then((found) => { pages.set(page, found.rows); list.paint(true); }, (error) => say(error.message));
      }
      return h("div.row.empty", {}, "…");
    }
    return h("a.row", { role: "row", href: rolloutAt(place), class: place === current ? "current" : "", style: { "grid-template-columns": template } }, columns.map(([, , , value]) => h("span", { role: "cell" }, value(row))));
  });
  const step = (by) => {
    current = Math.max(0, Math.min(first.total - 1, current + by));
    list.reveal(current);
    list.paint(true);
  };
  const results = h("div.results", {});
  add(body, [h("div.tools", {}, input, searchBox, h("span.dim", {}, `${count(first.total)}${where.length ? ` of ${count(found.summary.totals.rollouts)}` : ""} rollouts`), where.length ? h("button.quiet", { type: "button", onclick: () => go({ where: "" }) }, "clear filter ×") : null),
    problem, results, h("div.table", { role: "table", "aria-rowcount": first.total, "aria-label": "Rollouts" }, heads, first.total ? list.node : h("p.note", {}, problem.childElementCount ? "" : where.length ? "No rollout fits the filter." : found.summary.state === "running" ? "No rollout has ended yet." : "The run ended without a rollout: all its groups failed."))]);
  if (params.get("text")) search(run, params.get("text"), results);
  return {
    "/": ["filter", () => input.focus()],
    f: ["search in all text", () => searchBox.focus()],
    j: ["next rollout", () => step(1)],
    k: ["previous rollout", () => step(-1)],
    Enter: ["open the rollout", () => current >= 0 && rowAt(current) && (location.hash = rolloutAt(current))],
  };
}

async function search(run, text, results) {
  const list = h("ol", {}), note = h("p.note", { role: "status" }, "searching …");
  results.replaceChildren(h("section.found", { "aria-label": "Found" }, note, list));
  let after = 0, total = 1, n = 0, seen = false;
  try {
    while (after < total && n < 500 && (results.isConnected || !seen)) {
      seen = results.isConnected;
      const found = await get("search", { run, text, after });
      for (const [id, passage] of found.found) {
        const place = passage.toLowerCase().indexOf(text.toLowerCase());
        list.append(h("li", {}, h("a", { href: address("rollout", { run, id, text }) }, id), h("span.passage", {}, place < 0 ? passage : [passage.slice(0, place), h("mark", {}, passage.slice(place, place + text.length)), passage.slice(place + text.length)])));
        n++;
      }
      [after, total] = [found.next, found.total];
      note.textContent = after < total ? `${count(n)} found, ${count(after)} of ${count(total)} rollouts searched` : `${plural(n, "rollout")} with this text`;
    }
    if (after < total) note.textContent = `the first ${count(n)} rollouts with this text`;
  } catch (error) {
    note.textContent = error.message;
  }
}

async function groups({ run, body }) {
  const first = await get("groups", { run, limit: PAGE });
  const pages = new Map([[0, first.groups]]), asked = new Set([0]);
  const list = virtual(first.total, 34, (place) => {
    const page = Math.floor(place / PAGE), group = (pages.get(page) || [])[place % PAGE];
    if (!group) {
      if (!asked.has(page)) {
        asked.add(page);
        get("groups", { run, offset: page * PAGE, limit: PAGE }).then((found) => { pages.set(page, found.groups); list.paint(true); }, (error) => say(error.message));
      }
      return h("div.group.empty", {}, "…");
    }
    const rewards = group.cells.map((each) => each[2]).filter((each) => each !== null);
    const mean = rewards.length ? rewards.reduce((sum, each) => sum + each, 0) / rewards.length : null;
    const ids = group.cells.filter((each) => each[3] !== null).map(([id]) => id).slice(0, 8);
    return h("div.group", {}, h("span.n.dim", {}, String(group.number)), h("a.task", { href: address("run", { run, tab: "rollouts", where: JSON.stringify([["group", "=", group.group_id]]) }), title: plain(group.prompt) }, group.task),
      h("span.num", {}, figure(mean, 2)), h("span.cells", {}, group.cells.map((each) => cell(each, run))),
      ids.length > 1 ? h("a.button.small", { href: address("siblings", { run, id: ids }) }, "compare") : h("span", {}),
      h("span.prompt", { class: group.error ? "bad" : "dim" }, group.error || (rewards.length > 1 && new Set(rewards).size === 1 ? `all ${figure(rewards[0], 2)} · ` : "") + group.prompt));
  });
  add(body, [h("div.tools", {}, h("span.dim", {}, plural(first.total, "group")), h("span.legend", {}, h("i.cell.is-scored.is-full", { style: { "--share": "100%" } }), " 1 ", h("i.cell.is-scored", { style: { "--share": "50%" } }), " partial ", h("i.cell.is-scored.is-zero", {}), " 0 ", h("i.cell.is-unscored", {}), " unscored ", h("i.cell.is-flying", {}), " running ", h("i.cell.is-scored.differs", { style: { "--share": "50%" } }), " official verdict differs")), list.node]);
}

async function training({ found, body }) {
  body.append(charts(found.training));
}

async function nodes({ found, body }) {
  const row = (each) => h("tr", {}, h("th", { scope: "row" }, each.host, h("span.dim", {}, ` ${each.node.slice(0, 12)}`)), h("td", {}, each.level), h("td.num", {}, count(each.slots)), h("td.num", {}, count(each.rollouts)),
    h("td", { class: each.lost ? "bad" : "" }, each.lost || (each.losses ? `lost ${plural(each.losses, "time")}, back again` : "")));
  const heads = ["node", "isolation", "slots", "rollouts ended", "lost"].map((name) => h("th", { scope: "col" }, name));
  add(body, [h("section.card", {}, h("h2", {}, plural(found.nodes.length, "node")), h("table", {}, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, found.nodes.map(row))))]);
}

async function settings({ found, body }) {
  const entries = Object.entries(found.settings);
  add(body, [
    h("section.card", {}, h("h2", {}, "Settings that were set"), entries.length ? h("table", {}, h("tbody", {}, entries.map(([name, each]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, typeof each.value === "object" ? JSON.stringify(each.value) : String(each.value)), h("td.dim", {}, each.source))))) : h("p.note", {}, "All settings have their default values.")),
    Object.keys(found.provenance).length ? h("section.card", {}, h("h2", {}, "Versions"), tree(found.provenance)) : null]);
}

// A list in which only the rows on the screen exist. The page scrolls, not the list.
export function virtual(total, height, make) {
  const node = h("div.virtual", { style: { height: `${total * height}px` } });
  let from = -1, to = -1;
  const paint = (again = false) => {
    const top = -node.getBoundingClientRect().top;
    const first = Math.max(0, Math.min(total, Math.floor(top / height) - 8)), last = Math.min(total, Math.ceil((top + innerHeight) / height) + 8);
    if (!again && first === from && last === to) return;
    [from, to] = [first, last];
    const rows = [];
    for (let place = first; place < last; place++) {
      const row = make(place);
      row.style.setProperty("transform", `translateY(${place * height}px)`);
      row.style.setProperty("height", `${height}px`);
      rows.push(row);
    }
    node.replaceChildren(...rows);
  };
  const later = () => requestAnimationFrame(() => (node.isConnected ? paint() : (removeEventListener("scroll", later), removeEventListener("resize", later))));
  addEventListener("scroll", later, { passive: true });
  addEventListener("resize", later, { passive: true });
  requestAnimationFrame(() => paint(true));
  return {
    node, paint,
    reveal(place) {
      const top = node.getBoundingClientRect().top + scrollY + place * height;
      if (top < scrollY + 140) scrollTo(0, top - 140);
      else if (top + height > scrollY + innerHeight - 20) scrollTo(0, top + height - innerHeight + 20);
    },
  };
}
