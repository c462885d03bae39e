// Why a rollout has less than the full reward, in one line each: the tests that failed, and the calls that failed.

import { h, count, figure, plural, plain, clipped, oneLine } from "./dom.js";
import { argument } from "./siblings.js";
import { start } from "./text.js";

const SHOWN = 5;

// A mapping from names to results.
const PASSED = new Set([true, "passed", "pass", "ok"]), RESULTS = new Set([true, false, "passed", "pass", "ok", "failed", "fail", "error", "skipped", "missing"]);
const word = (each) => (typeof each === "string" ? each.toLowerCase() : each);
export const passed = (each) => PASSED.has(word(each));
export const isTests = (value) => value !== null && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length > 0 && Object.values(value).every((each) => RESULTS.has(word(each)));

// `go` makes a link to a turn of the page, or to the evidence of the check.
// `compare` makes a link to the comparison with a sibling.
export function reasons(rollout, go, compare) {
  if (rollout.in_flight || rollout.reward >= 1) return [];
  const check = rollout.check || { failed: [] }, found = [];
  if (check.failed.length) found.push(failedTests(check, go(null, "evidence")));
  const missing = (rollout.detail || {}).missing_in_check;
  if (Array.isArray(missing) && missing.length) found.push([h("b", {}, "The check could not run: "), missing.slice(0, SHOWN).map(String).join("; ")]);
  const errors = rollout.tool_errors || [];
  if (errors.length) found.push([h("b", {}, `${plural(errors.length, "call")} failed. `), errors[0].tool ? `${errors[0].tool}, ` : "", go(errors[0].turn, `turn ${errors[0].turn}`), `: ${clipped(oneLine(plain(start(errors[0].error))), 300)}`]);
  if (!(rollout.turns || []).length && !rollout.error && !(rollout.messages || []).some((message) => message.role === "assistant")) found.push(["The model did not reply."]);
  if (rollout.contrast) found.push(unexplained(rollout.contrast, go, compare));
  const { count: exits, first } = rollout.exits || {};
  if (exits) found.push([h("b", {}, `${plural(exits, "call")} ended with a nonzero exit code. `), first.tool ? `${first.tool}, ` : "", go(first.turn, `turn ${first.turn}`), `: exit code ${first.code}: `, h("code", {}, clipped(oneLine(argument(first.arguments)), 120))]);
  return found.map((each) => h("p.callout.is-warn", {}, each));
}

function unexplained({ id, reward, call, evidence }, go, compare) {
  const named = (each) => (each ? [`${each[0]} `, h("code", {}, clipped(oneLine(argument(each[1])), 120))] : "no call");
  return [evidence ? [h("b", {}, "No test is listed. "), "See what the check ", go(null, "recorded"), ". "] : [h("b", {}, "The check recorded only a number. ")],
    id ? [`The sibling #${id.slice(id.lastIndexOf("/") + 1)} has the reward ${figure(reward, 2)}`, call ? [`; call ${call.number} is `, named(call.own), " here and ", named(call.other), " there"] : " with the same calls", ": ", compare(id)] : evidence ? null : ["A check records why with ", h("code", {}, "Score(reward, detail={…})"), "."]];
}

// The tests that failed, each with the lines of its output that explain it, as the server found them in the evidence.
function failedTests({ failed, failures, total }, evidence) {
  const words = total === null ? `${plural(failures, "test")} failed: ` : `${count(failures)} of ${plural(total, "test")} failed: `;
  const some = failed.slice(0, SHOWN), more = failures > SHOWN ? " …" : "";
  if (!some.some(([, , output]) => output)) return [h("b", {}, words), some.map(([test]) => test).join(", "), more, " ", evidence];
  return [h("b", {}, words), evidence, some.map(([test, status, output]) => h("span.failed-test", {}, h("b", {}, test), status === "failed" ? null : ` (${status})`, output ? h("code.output", {}, output) : null)), more];
}
