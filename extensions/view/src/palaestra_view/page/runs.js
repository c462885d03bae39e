// All runs side by side as one table, with paired differences from a chosen run.

import { h, chip, count, short, figure, seconds, when, strip, stack, link, address, plural, say } from "./dom.js";
import { get, isFile } from "./api.js";

export const OUTCOMES = ["natural", "max_turns", "length", "budget", "cancelled", "api_error", "infra_error"];
const MOST_CRITERIA = 3;
let base = null, sorting = ["started_at", true], filter = "";

export async function show(params, shell) {
  shell.title("Runs", [["runs", null]]);
  const found = await get("runs");
  if (params.has("base")) base = params.get("base");
  const node = h("div.runs", {});
  let differences = {};
  if (base && !found.runs.some((run) => run.name === base)) base = null;
  const compare = async () => {
    differences = {};
    if (base && !isFile()) {
      const env = found.runs.find((run) => run.name === base).env;
      const names = found.runs.filter((run) => run.env === env && run.name !== base && run.reward.mean !== null).map((run) => run.name);
      if (names.length) differences = await get("compare", { base, run: names });
    }
    paint();
  };
  const input = h("input", { type: "search", placeholder: "filter by name, environment, model, state", "aria-label": "Filter runs", oninput: () => { filter = input.value; paint(); } });
  input.value = filter;
  const table = h("div.scroll", {});
  const notes = h("div", {});
  let listed = [];
  function paint() {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const runs = found.runs.filter((run) => words.every((word) => `${run.name} ${run.env} ${run.model} ${run.state} ${run.kind}`.toLowerCase().includes(word)));
    runs.sort((a, b) => {
      const [one, two] = [sortValue(a, sorting[0]), sortValue(b, sorting[0])];
      if (one === two) return 0;
      if (one === null) return 1;
      if (two === null) return -1;
      return (one < two ? -1 : 1) * (sorting[1] ? -1 : 1);
    });
    listed = runs;
    const names = [...new Set(runs.flatMap((run) => Object.keys(run.criteria)))].slice(0, MOST_CRITERIA);
    const judged = runs.some((run) => run.official), labelled = runs.some((run) => Object.keys(run.labels).length), costs = runs.some((run) => run.totals.cost !== null);
    const failed = runs.some((run) => Object.keys(run.blame).length);
    const compared = base !== null;
    const column = (name, key, title = "") => h("th", { scope: "col", "aria-sort": sorting[0] === key ? (sorting[1] ? "descending" : "ascending") : null, title: title || null }, key ? h("button", { type: "button", onclick: () => { sorting = [key, sorting[0] === key ? !sorting[1] : true]; paint(); } }, name, sorting[0] === key ? (sorting[1] ? " ↓" : " ↑") : "") : name);
    const values = runs.flatMap((run) => [run.reward.mean, ...(run.reward.interval || [])]).filter((each) => each !== null);
    const [low, high] = [Math.min(0, ...values), Math.max(1, ...values)];
    table.replaceChildren(h("table.wide", {}, h("thead", {}, h("tr", {},
      column("run", "name"), column("model", "model"), column("state", "state"), column("reward", "reward", "mean reward of the scored rollouts, with its 95% interval"),
      isFile() ? null : column("difference", null, "paired by task, from the chosen run"), judged ? column("official", "official") : null, column("scored", "scored", "scored and planned rollouts"), names.map((name) => column(name, `criteria.${name}`)),
      column("outcomes", null), failed ? column("blame", null) : null, labelled ? column("labels", null) : null, column("tokens", "tokens"), costs ? column("cost", "cost") : null, column("rollout", "seconds", "mean time of a rollout"), column("started", "started_at"))),
      h("tbody", {}, runs.map((run) => h("tr", { class: run.name === base ? "base" : "" },
        h("th", { scope: "row" }, link("run", { run: run.name }, run.env || run.name), h("div.dim.small", {}, run.name)),
        h("td", {}, run.model), h("td", {}, state(run)),
        h("td.num", {}, h("b", {}, figure(run.reward.mean)), strip(run.reward.mean, run.reward.interval, low, high), run.reward.interval ? h("span.dim.small", {}, `${figure(run.reward.interval[0], 2)}–${figure(run.reward.interval[1], 2)}`) : null),
        isFile() ? null : h("td", {}, difference(run, differences[run.name])),
        judged ? h("td.num", {}, run.official ? figure(run.official.mean) : "–", run.differs ? h("div.small.warn", {}, `${count(run.differs)} differ`) : null) : null,
        h("td.num", {}, count(run.scored), h("span.dim", {}, ` of ${count(run.planned)}`), run.groups.dull ? h("div.small.dim", { title: "groups whose rewards are all equal: a policy gradient learns nothing from them; for an evaluation this means nothing" }, `${count(run.groups.dull)} of ${count(run.groups.ended)} groups with equal rewards`) : null),
        names.map((name) => h("td.num", {}, figure(run.criteria[name] ?? null))),
        h("td", {}, stack(run.outcomes, OUTCOMES)),
        failed ? h("td.small", {}, Object.entries(run.blame).slice(0, 3).map(([name, n]) => h("div", {}, `${name} ${count(n)}`))) : null,
        labelled ? h("td", {}, Object.entries(run.labels).slice(0, 3).map(([name, n]) => link("run", { run: run.name, where: JSON.stringify([["label", "=", name]]) }, chip(`${name} ${count(n)}`, "warn")))) : null,
        h("td.num", { title: `${count(run.totals.prompt_tokens)} read, ${count(run.totals.completion_tokens)} written` }, short((run.totals.prompt_tokens || 0) + (run.totals.completion_tokens || 0))),
        costs ? h("td.num", {}, run.totals.cost === null ? "–" : figure(run.totals.cost, 4)) : null,
        h("td.num", {}, seconds(run.totals.seconds ? run.totals.seconds / run.totals.rollouts : null)),
        h("td.small", {}, when(run.started_at)))))));
    notes.replaceChildren(...[
      runs.length ? null : h("p.note", {}, "No run fits the filter."),
      found.more ? h("p.note", {}, `${plural(found.more, "older run")} are not listed. Name a run to see it.`) : null,
      compared ? h("p.note", {}, "The difference is the mean over the tasks with a reward in both runs, each run minus the chosen run, with its 95% interval. With many comparisons, one interval in 20 does not contain the true value.") : null,
      ...Object.entries(found.problems).map(([name, why]) => h("p.callout.is-bad", {}, h("b", {}, name), ` cannot be shown: ${why}`)),
    ].filter(Boolean));
  }
  function difference(run, result) {
    if (run.name === base) return h("button.quiet", { type: "button", onclick: () => { base = null; compare(); } }, "baseline ×");
    if (!base) return h("button.quiet", { type: "button", title: "compare all runs of this environment with this one", onclick: () => { base = run.name; compare().catch((error) => say(error.message)); } }, "set as baseline");
    if (!result) return h("span.dim", {}, "–");
    if (result.problem) return h("span.dim.small", { title: result.problem }, "no shared task");
    const sign = result.difference > 0 ? "+" : "";
    const more = [result.undecided && `no winner: ${result.undecided}`, result.counterfactual && "counterfactual: one of the runs continues a rollout of another run"].filter(Boolean);
    const whole = result.with_unscored;
    return h("div.num", { title: more.join("; ") }, h("b", { class: result.winner > 0 ? "good" : result.winner < 0 ? "bad" : "" }, `${sign}${result.difference.toFixed(3)}`),
      result.interval ? h("div.dim.small", {}, `${result.interval[0].toFixed(2)} to ${result.interval[1].toFixed(2)}`) : null, h("div.dim.small", {}, `${plural(result.tasks, "task")}${result.undecided ? ", no winner" : ""}`),
      whole ? h("div.dim.small", {}, `unscored as 0: ${whole.difference > 0 ? "+" : ""}${whole.difference.toFixed(3)}`) : null);
  }
  const benchmark = isFile() ? null : h("button.quiet", { type: "button", title: "pass@1, pass@k, cost, time and tokens of the listed runs, as palaestra runs --table prints them", onclick: () => figures().catch((error) => say(error.message)) }, "table of figures");
  const shown = h("div.scroll", {});
  async function figures() {
    if (shown.firstChild) return shown.replaceChildren();
    benchmark.disabled = true;
    try {
      const result = await get("table", { run: listed.map((run) => run.name) });
      const numbers = new Set(["pass@1", "pass@k", "mean reward", "official", "tasks scored", "rollouts scored", "cost", "time", "tokens"]);
      shown.replaceChildren(h("table.wide", {}, h("caption", {}, result.about), h("thead", {}, h("tr", {}, result.columns.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, result.rows.map((row) => h("tr", {}, row.cells.map((cell, n) => n === 0 ? h("th", { scope: "row" }, link("run", { run: row.run }, cell)) : h(numbers.has(result.columns[n]) ? "td.num" : "td", {}, cell)))))),
      ...Object.entries(result.problems).map(([name, why]) => h("p.note", {}, `${name} is not in the table: ${why}`)));
    } finally {
      benchmark.disabled = false;
    }
  }
  node.append(h("div.tools", {}, h("h1", {}, "Runs"), input, benchmark, h("span.dim", {}, `${plural(found.runs.length, "run")} in ${found.root}`)), shown, table, notes);
  paint();
  if (base) compare().catch((error) => say(error.message));
  return { node, live: "*", following: found.runs.some((run) => run.state === "running"), keys: { "/": ["filter", () => input.focus()] } };
}

function sortValue(run, key) {
  if (key === "reward" || key === "official") return run[key] ? run[key].mean : null;
  if (key.startsWith("criteria.")) return run.criteria[key.slice(9)] ?? null;
  if (key === "tokens") return (run.totals.prompt_tokens || 0) + (run.totals.completion_tokens || 0);
  if (key === "cost") return run.totals.cost;
  if (key === "seconds") return run.totals.seconds ? run.totals.seconds / run.totals.rollouts : null;
  return run[key] ?? null;
}

export function state(run) {
  const [read, size] = run.indexed;
  const parts = [h(`span.state.is-${/^[a-z]+$/.test(run.state) ? run.state : "other"}`, {}, run.state)];
  if (run.kind !== "run") parts.push(h("span.dim.small", {}, ` ${run.kind}`));
  if (size - read > 1e6) parts.push(h("div.small.dim", {}, `reading ${Math.floor((100 * read) / size)}%`));
  else if (run.totals.flying && run.state === "running") parts.push(h("div.small.dim", {}, `${count(run.totals.flying)} in flight`));
  if (run.damaged) parts.push(h("div.small.warn", {}, `${plural(run.damaged, "damaged record")}`));
  return parts;
}
