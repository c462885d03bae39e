// The filter's grammar: `reward<1 outcome:max_turns label=tests_edited parser`.
// The rest are words in task, error, category and answer.

const TEXTS = ["task", "id", "outcome", "blame", "label", "error", "category", "answer", "group"];
const NUMBERS = ["reward", "official", "tokens", "turns", "seconds", "calls", "errors", "exits", "cost", "index", "started", "segments", "recorded", "regraded"];
const MARKS = ["tag", "verdict", "note"];
export const FIELDS = [...TEXTS, ...NUMBERS, ...MARKS];
const HEADS = new Map([["time", "seconds"], ["labels", "label"], ["failed", "errors"], ["judged", "verdict"]]);
const BARE = ["differs", "changed"], ORDERED = ["<", ">", "<=", ">="];
const TERM = /^([^\s:=!<>"]+)(:|!=|<=|>=|=|<|>)(.*)$/s;
const APART = /"[^"]*"|(^|\s)([^\s:=!<>"]+)\s*(!=|<=|>=|=|<|>|:)\s*(?=[^\s:=!<>/])/g;
const NAME = /^[A-Za-z_][A-Za-z0-9_.-]*$/;
const NUMBER = /^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?$/i;

// `criteria` are the names of the environment's own criteria.
export function parse(text, criteria = []) {
  const where = [], problems = [];
  const fieldOf = (name) => (FIELDS.includes(name) || name.startsWith("metric.") ? name : criteria.includes(name) ? `metric.${name}` : HEADS.get(name) || "");
  const joined = text.replace(APART, (found, before, name, comparison) => (name && fieldOf(name) ? `${before}${name}${comparison}` : found));
  for (const [word] of joined.matchAll(/(?:[^\s"]|"[^"]*")+/g)) {
    if (BARE.includes(word)) {
      where.push([word, "=", 1]);
      continue;
    }
    const [, name = "", comparison = "", raw = ""] = word.match(TERM) || [];
    const field = fieldOf(name);
    if (field) {
      const inside = raw.replace(/^"(.*)"$/s, "$1"), value = inside === "none" ? "" : inside;
      const problem = problemOf(field, comparison, value);
      if (problem) problems.push(problem);
      else where.push([field, comparison, value]);
    } else if (raw && !":/".includes(raw[0]) && NAME.test(name)) problems.push(`there is no field ${name}`);
    else where.push(["any", ":", word.replace(/"/g, "")]);
  }
  return { where, problems };
}

function problemOf(field, comparison, value) {
  const ordered = ORDERED.includes(comparison);
  if (!NUMBERS.includes(field) && !field.startsWith("metric.")) return ordered ? `${field} is text, so it cannot be compared with ${comparison}` : "";
  return !NUMBER.test(value) && (ordered || value !== "") ? `${field} needs a number, not ${value || "nothing"}` : "";
}

const quoted = (value, unsafe) => (value === "" ? "none" : unsafe.test(value) ? `"${String(value).replace(/"/g, "")}"` : value);
export const asText = (where) => where.map(([field, comparison, value]) => (BARE.includes(field) ? field : field === "any" ? quoted(value, /[\s":=!<>]/) : `${field}${comparison}${quoted(value, /[\s"]/)}`)).join(" ");
