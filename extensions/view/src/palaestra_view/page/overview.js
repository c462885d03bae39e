// What a run's first page reports beyond its figures: notes on failures and verdicts, and the table of scores.

import { h, count, figure, plain, plural, address } from "./dom.js";
import { leftOut } from "./api.js";

const SHOWN = 5;

export function notes(found, run) {
  // The first rollout that failed in this way is a link.
  const linked = (line, id) => {
    const at = id ? line.indexOf(id) : -1;
    return at < 0 ? line : [line.slice(0, at), h("a", { href: address("rollout", { run, id }) }, id), line.slice(at + id.length)];
  };
  const lines = (title, each) => (each.length ? h("div.callout.is-warn.lines", {}, h("b", {}, title), h("ul", {}, each.slice(0, SHOWN).map((line) => h("li", {}, line))),
    each.length > SHOWN ? h("details", {}, h("summary", {}, `${count(each.length - SHOWN)} more`), h("ul", {}, each.slice(SHOWN).map((line) => h("li", {}, line)))) : null) : null);
  return h("div.run-notes", {},
    leftOut() ? h("p.callout.is-info", {}, `This file has ${count(found.summary.totals.rollouts - leftOut())} of the run's ${plural(found.summary.totals.rollouts, "rollout")}. The figures are those of all.`) : null,
    lines("Failures", (found.causes || []).map((line, place) => linked(line, (found.first_failures || [])[place]))), lines("Official verdicts", found.verdicts || []),
    found.resumed ? h("p.callout", {}, `Resumed: ${found.resumed}`) : null);
}

// The table has a row for all tasks and one for each category, and a column for each metric with an interval.
export async function scores({ found, body }) {
  const rows = found.scores || [], own = Object.entries(found.own || {});
  const names = ["mean_reward", "pass_rate", ...new Set(rows.flatMap((row) => Object.keys(row).filter((key) => key.startsWith("pass@") && !key.includes("/"))))].filter((name) => rows.some((row) => Number.isFinite(row[name])));
  const cell = (row, name) => (Number.isFinite(row[name])
    ? [figure(row[name]), Number.isFinite(row[`${name}/low`]) ? h("span.dim.small", {}, ` ${figure(row[`${name}/low`], 2)}–${figure(row[`${name}/high`], 2)}`) : null, row[`${name}/tasks`] !== undefined && row[`${name}/tasks`] !== row.tasks ? h("div.small.warn", { title: "the other tasks have too few scored rollouts" }, `only ${count(row[`${name}/tasks`])} of ${plural(row.tasks, "task")}`) : null]
    : "–");
  body.append(h("section.card.scroll", {}, h("h2", {}, "Scores"), h("table.scores", {},
    h("thead", {}, h("tr", {}, ["", "tasks", "scored", ...names.map((name) => name.replace("_", " "))].map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, rows.map((row) => h("tr", {}, h("th", { scope: "row" }, plain(row.name) || "all tasks"), h("td.num", {}, count(row.tasks)), h("td.num", {}, `${count(row.scored)} of ${count(row.planned)}`), names.map((name) => h("td.num", {}, cell(row, name)))))))));
  if (own.length) body.append(h("section.card", {}, h("h2", {}, "The environment's own metrics"), h("table", {}, h("tbody", {}, own.map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td.num", {}, figure(value))))))));
  return {};
}
