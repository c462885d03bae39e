// The filter's grammar: `reward<1 outcome:max_turns label=tests_edited parser`. The rest are words in task, error, answer.

export const FIELDS = ["task", "id", "outcome", "blame", "label", "error", "category", "answer", "group", "reward", "official", "tokens", "turns", "seconds", "calls", "errors", "cost", "index", "segments", "tag", "verdict", "note", "regraded"];
const BARE = ["differs", "changed"];
const TERM = /^(differs|changed|[a-z]+(?:\.[^\s:=!<>]+)?)(?:(:|!=|<=|>=|=|<|>)(.*))?$/s;

export function parse(text) {
  const where = [], problems = [];
  for (const found of text.matchAll(/(?:[^\s"]|"[^"]*")+/g)) {
    const word = found[0];
    const [, field, comparison, raw] = word.match(TERM) || [];
    if (BARE.includes(field) && !comparison) where.push([field, "=", 1]);
    else if (comparison && (FIELDS.includes(field) || field.startsWith("metric."))) {
      const value = raw.replace(/^"(.*)"$/s, "$1");
      where.push([field, comparison, value === "none" ? "" : value]);
    } else if (comparison && !/["/]/.test(field || "") && ["<", ">", "<=", ">="].includes(comparison)) problems.push(`there is no field ${field}`);
    else where.push(["any", ":", word.replace(/"/g, "")]);
  }
  return { where, problems };
}

const quoted = (value) => (value === "" ? "none" : /[\s"]/.test(value) ? `"${String(value).replace(/"/g, "")}"` : value);
export const asText = (where) => where.map(([field, comparison, value]) => (BARE.includes(field) ? field : field === "any" ? quoted(value) : `${field}${comparison}${quoted(value)}`)).join(" ");
