// The data: from the server, or from the file that the page is part of (then `embedded` has the answers by address).

let embedded = null;
export const isFile = () => embedded !== null;
export const ofFile = () => embedded.answers.runs.runs[0].name;
export const leftOut = () => embedded?.left_out || 0;

export async function open() {
  const place = document.getElementById("data");
  if (!place) return;
  const packed = Uint8Array.from(atob(place.textContent.trim()), (each) => each.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  embedded = JSON.parse(await new Response(stream).text());
}

export function query(params) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(params)) {
    for (const each of Array.isArray(value) ? value : [value]) if (each !== undefined && each !== null && each !== "") found.append(name, each);
  }
  return found.toString();
}

const kept = new Map();

export async function get(name, params = {}, signal = undefined) {
  if (embedded) return fromFile(name, params);
  const response = await fetch(`/api/${name}?${query(params)}`, { signal });
  const body = await response.json().catch(() => ({ detail: response.statusText }));
  if (!response.ok) throw new Error(body.detail || response.statusText);
  return body;
}

export async function post(name, body) {
  const response = await fetch(`/api/${name}`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const answer = await response.json().catch(() => ({ detail: response.statusText }));
  if (!response.ok) throw new Error(answer.detail || response.statusText);
  return answer;
}

// Answers that do not change while a rollout is finished are kept for going back and forth.
export async function getKept(name, params) {
  const key = `${name}?${query(params)}`;
  if (!kept.has(key)) {
    const found = await get(name, params);
    if (found.in_flight) return found;
    kept.set(key, found);
    if (kept.size > 24) kept.delete(kept.keys().next().value);
  }
  return kept.get(key);
}

function fromFile(name, params) {
  if (name === "rollouts") return filtered(embedded.rows, params);
  if (name === "groups") {
    const offset = Number(params.offset || 0), limit = Number(params.limit || 200);
    return { total: embedded.groups.length, groups: embedded.groups.slice(offset, offset + limit) };
  }
  if (name === "search") return searched(params.text);
  if (name === "siblings") return embedded.answers[`siblings?${params.id[0].slice(0, params.id[0].lastIndexOf("/"))}`] || missing("this comparison");
  const key = ["rollout", "forks", "judgement"].includes(name) ? `${name}?${params.id}` : name === "tokens" ? `tokens?${params.id}?${params.row || 0}` : name;
  return embedded.answers[key] || missing(name === "rollout" ? `rollout ${params.id}` : name);
}

function missing(what) {
  throw new Error(`${what} is not in this file: open the run with palaestra view`);
}

const NUMBERS = { reward: (row) => row.reward, official: (row) => row.official ?? row.reward, tokens: (row) => row.prompt_tokens + row.completion_tokens, index: (row) => row.position };
export function valueOf(row, field) {
  if (field.startsWith("metric.")) return row.metrics[field.slice(7)];
  if (field === "label") return row.labels;
  if (field === "tag") return row.tags;
  if (field === "group") return row.group_id;
  return field in NUMBERS ? NUMBERS[field](row) : row[field];
}

function fits(row, [field, comparison, value]) {
  if (field === "differs") return row.official !== null && row.official !== row.reward;
  if (field === "changed") return row.regraded !== null && row.regraded !== row.recorded;
  if (field === "any") return [row.task, row.id, row.error, row.category, row.answer].some((each) => String(each || "").toLowerCase().includes(String(value).toLowerCase()));
  const found = valueOf(row, field);
  if (field === "label" || field === "tag") {
    const has = value === "" ? found.length === 0 : comparison === ":" ? found.some((each) => each.includes(value)) : found.includes(value);
    return comparison === "!=" ? !has : has;
  }
  if (value === "" && typeof found !== "string") return (found === null || found === undefined) === (comparison !== "!=");
  if (typeof found === "string" || ["task", "id", "outcome", "blame", "error", "category", "answer", "group", "verdict", "note"].includes(field)) {
    const text = String(found ?? "");
    return comparison === ":" ? text.toLowerCase().includes(String(value).toLowerCase()) : comparison === "!=" ? text !== value : text === value;
  }
  if (found === null || found === undefined) return false;
  const number = Number(value);
  return { ":": found === number, "=": found === number, "!=": found !== number, "<": found < number, "<=": found <= number, ">": found > number, ">=": found >= number }[comparison];
}

function filtered(rows, params) {
  const where = JSON.parse(params.where || "[]");
  const found = rows.filter((row) => where.every((each) => fits(row, each)));
  if (params.sort) {
    const sign = params.descending ? -1 : 1;
    found.sort((a, b) => {
      const [one, two] = [valueOf(a, params.sort), valueOf(b, params.sort)];
      if (one === two) return 0;
      if (one === null || one === undefined) return 1;
      if (two === null || two === undefined) return -1;
      return one < two ? -sign : sign;
    });
  }
  const offset = Number(params.offset || 0);
  return { total: found.length, rows: found.slice(offset, offset + Number(params.limit || 200)) };
}

function searched(text) {
  const wanted = text.toLowerCase();
  const found = [];
  for (const [key, value] of Object.entries(embedded.answers)) {
    if (!key.startsWith("rollout?")) continue;
    const whole = JSON.stringify(value.messages) + JSON.stringify(value.detail || {});
    const at = whole.toLowerCase().indexOf(wanted);
    if (at >= 0) found.push([value.id, whole.slice(Math.max(0, at - 80), at + 80)]);
  }
  return { found, next: 1, total: 1 };
}

export function listen(told) {
  if (embedded || !window.EventSource) return;
  const source = new EventSource("/api/events");
  source.onmessage = (event) => told(JSON.parse(event.data));
  source.onerror = () => document.body.classList.add("offline");
  source.onopen = () => {
    if (document.body.classList.contains("offline")) told({}); // what happened meanwhile was not told
    document.body.classList.remove("offline");
  };
}
