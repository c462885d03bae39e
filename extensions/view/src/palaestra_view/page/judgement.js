// What people say about a rollout: tags, notes and a verdict; and its old and new reward after it was graded again.

import { h, chip, count, figure, when, strip, rewardTag, plural, say } from "./dom.js";
import { get, post, isFile } from "./api.js";
import { block } from "./text.js";

export const judgementOf = (run, id) => get("judgement", { run, id }).catch(() => null);

const spoken = (verdict) => verdict.replace(/_/g, " ");

// The section of a rollout's page, which draws itself again after each change.
export function judgement(run, rollout, found) {
  const node = h("section.judgement", { "aria-label": "Judgement" });
  if (!found) return node;
  const change = async (more) => {
    try {
      draw(await post("annotate", { run, id: rollout.id, ...more }));
    } catch (error) {
      say(error.message);
    }
  };
  const draw = (answer) => node.replaceChildren(...parts(answer, rollout, change));
  draw(found);
  return node;
}

function parts(answer, rollout, change) {
  const said = answer.judgement, writable = !isFile() && !rollout.in_flight;
  const tags = (said.tags || []).map((tag) => chip(writable ? `${tag} ×` : tag, "", writable ? { onclick: () => change({ untag: [tag] }), title: `remove the tag ${tag}` } : {}));
  const shown = [];
  if (answer.problem) shown.push(h("p.callout.is-bad", {}, answer.problem));
  if (said.verdict) shown.push(h("p.callout", { class: said.verdict === "correct" ? "is-info" : "is-warn" }, h("b", {}, `${spoken(said.verdict)}. `), answer.verdicts[said.verdict] || "", h("span.dim", {}, ` ${said.verdict_author || ""}`)));
  for (const note of said.notes || []) shown.push(h("div.note-said", {}, h("span.dim.small", {}, `${note.author}, ${when(note.at)}`), block(note.text)));
  if (!writable) return [tags.length ? h("div.chips", {}, tags) : null, ...shown].filter(Boolean);
  const buttons = Object.entries(answer.verdicts).map(([name, meaning]) => {
    const on = said.verdict === name;
    return h("button.button", { type: "button", title: meaning, "aria-pressed": String(on), onclick: () => change({ verdict: on ? "none" : name }) }, spoken(name));
  });
  const tag = h("input", { type: "text", placeholder: "add a tag", "aria-label": "Add a tag", maxlength: 60 });
  tag.addEventListener("keydown", (event) => event.key === "Enter" && tag.value.trim() && change({ tags: tag.value.trim().split(/[\s,]+/) }));
  const note = h("input.note-input", { type: "text", placeholder: "add a note", "aria-label": "Add a note", maxlength: 10000 });
  note.addEventListener("keydown", (event) => event.key === "Enter" && note.value.trim() && change({ note: note.value }));
  return [h("div.judge", {}, h("span.dim", {}, "verdict"), buttons, tags, tag, note), ...shown];
}

// Facts of a rollout that was graded again.
export function gradeFacts(found, fact) {
  const grade = found && found.grade;
  if (!grade) return;
  if (grade.reward !== undefined && grade.reward !== null) fact("recorded reward", rewardTag(grade.before), `graded again ${when(grade.at)}`);
  if (grade.error) fact("graded again", h("span.bad", {}, "failed"), `graded again ${when(grade.at)}: ${grade.error}`);
}

// The line of a run's page: both mean rewards, and what people have said.
export function judgedRun(found, where) {
  const parts = [];
  const again = found && found.regraded;
  if (again && again.rollouts) {
    const one = (name, each) => h("span.regraded", {}, h("span.dim", {}, name), " ", h("b", {}, figure(each.mean)), each.interval ? h("span.dim.small", {}, ` ${figure(each.interval[0], 2)}–${figure(each.interval[1], 2)}`) : null, strip(each.mean, each.interval));
    parts.push(h("div.regrade", {}, h("span", {}, `${plural(again.rollouts, "rollout")} graded again ${when(again.at)}:`), one("recorded reward", again.before), one("new reward", again.after),
      chip(`${count(again.changed)} changed`, again.changed ? "warn" : "", { onclick: () => where(["changed", "=", 1]) }), again.failed ? h("span.bad", {}, `${count(again.failed)} failed`) : null));
  }
  const chips = [
    ...Object.entries((found && found.verdicts) || {}).map(([name, n]) => chip(`verdict: ${spoken(name)} ${count(n)}`, name === "correct" ? "good" : "warn", { onclick: () => where(["verdict", "=", name]) })),
    ...Object.entries((found && found.tags) || {}).map(([name, n]) => chip(`tag: ${name} ${count(n)}`, "", { onclick: () => where(["tag", "=", name]) })),
  ];
  if (chips.length) parts.push(h("div.chips", {}, chips));
  if (found && found.damaged) parts.push(h("p.callout.is-warn", {}, `${plural(found.damaged, "line")} of the annotations cannot be read and are left out.`));
  if (found && found.problem) parts.push(h("p.callout.is-bad", {}, found.problem));
  return parts.length ? h("section.judged", { "aria-label": "Judgement" }, parts) : null;
}

// The columns of the list of rollouts.
export function judgedColumns(found) {
  const said = found && (Object.keys(found.tags).length > 0 || Object.keys(found.verdicts).length > 0);
  return [
    ...(found && found.regraded ? [["recorded", "recorded", "5em", (row) => (row.regraded === null ? "" : rewardTag(row.recorded))]] : []),
    ...(said ? [["judged", "", "minmax(8em, 14em)", (row) => [row.verdict ? h("b", {}, spoken(row.verdict)) : null, row.verdict && row.tags.length ? " " : null, row.tags.join(", ")]]] : []),
  ];
}
