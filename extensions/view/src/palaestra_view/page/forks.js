// Counterfactual runs: how often a rollout succeeds from each of its turns, and the rollout that a fork continues.

import { h, figure, strip, address } from "./dom.js";
import { get, isFile } from "./api.js";

export const forksOf = (run, id) => get("forks", { run, id }).catch(() => ({ turns: [], origin: null }));

const linked = (name, ...children) => (isFile() ? h("span", {}, ...children) : h("a", { href: address("run", { run: name }) }, ...children));

function words(each) {
  const when = each.turn ? `after turn ${each.turn}` : "from its beginning";
  if (!each.scored) return `continued ${when}, without a score yet`;
  const interval = each.interval ? `, 95% interval ${figure(each.interval[0], 2)} to ${figure(each.interval[1], 2)}` : "";
  return `${each.passed} of ${each.scored} rollouts that continue it ${when} have the full reward${interval}`;
}

function odds(each) {
  return h("span.odds", { title: words(each), role: "img", "aria-label": words(each) },
    each.scored ? [strip(each.rate, each.interval), h("b", {}, figure(each.rate, 2))] : null);
}

// Puts the success rate beside each turn from which forks exist. `turns` are the steps of the page, in order.
export function mark(turns, found) {
  for (const each of found.turns) {
    const turn = each.turn ? turns.find((one) => one.number === each.turn) : turns.find((one) => one.node.classList.contains("r-user"));
    if (!turn) continue;
    const runs = each.runs.map((run) => linked(run.name, `${run.passed}/${run.scored}${run.scored < run.rollouts ? ` of ${run.rollouts}` : ""}`));
    turn.node.querySelector("header").append(h("span.forked", {}, each.turn ? "from here " : "from the start ", odds(each), runs));
    turn.link.append(h("span.odds-small", { title: words(each) }, each.scored ? `${each.passed}/${each.scored}` : "…"));
  }
}

// The callouts of a counterfactual rollout: what it continues, and whether its state is that of the recorded turn.
export function origin(rollout, name) {
  const from = rollout.origin;
  if (!from) return [];
  const params = { run: name, id: from.rollout_id, turn: from.turn || null };
  const where = name && !isFile() ? h("a", { href: address("rollout", params) }, from.rollout_id) : from.rollout_id;
  const state = { kept: "Its sandbox started from the kept workspace of that turn, without its processes and /tmp.", rebuilt: "Its sandbox was rebuilt: the recorded calls ran again." }[from.state];
  return [
    h("p.callout.is-info", {}, h("b", {}, "Counterfactual. "), "It continues ", where, ` of the run ${from.run_id} `, from.turn ? `after turn ${from.turn}. ` : "from its beginning. ", state || ""),
    from.difference ? h("p.callout.is-warn", {}, h("b", {}, "The rebuilt state may differ. "), from.difference) : null,
  ];
}

export function originOfRun(fork) {
  if (!fork) return null;
  const where = fork.run && !isFile() ? h("a", { href: address("rollout", { run: fork.run, id: fork.rollout_id, turn: fork.turn || null }) }, fork.rollout_id) : fork.rollout_id;
  return h("p.callout.is-info", {}, h("b", {}, "Counterfactual. "), "All rollouts continue ", where, ` of the run ${fork.run_id} `, fork.turn ? `after turn ${fork.turn}.` : "from its beginning.", " They are not exported for training unless that is asked for.");
}
