// Curves over training steps, with axes: one chart for each figure of a step, evaluations in the same chart.

import { h, svg, figure } from "./dom.js";

const FIRST = ["reward", "official", "loss", "kl", "logprob_difference", "dull_groups", "groups_without_signal", "completion_tokens", "tokens", "staleness", "rollout_s", "train_s", "overhead"];
const WHAT = { reward: "mean reward", logprob_difference: "sampler to trainer, nats, worst row", kl: "KL of sampler and trainer, nats per token", dull_groups: "groups of equal rewards", completion_tokens: "sampled tokens of a row", staleness: "versions between sampling and training", rollout_s: "seconds of rollouts in a step", train_s: "seconds of training in a step", overhead: "share of overhead" };

export function charts(lines) {
  const names = [...new Set(lines.flatMap((line) => Object.keys(line).filter((key) => typeof line[key] === "number" && !["step", "time", "at"].includes(key))))];
  names.sort((a, b) => (FIRST.includes(a) ? FIRST.indexOf(a) : 99) - (FIRST.includes(b) ? FIRST.indexOf(b) : 99) || (a < b ? -1 : 1));
  return h("div.charts", {}, names.map((name) => {
    const curves = [["training", lines.filter((line) => line.kind === "step")], ["held out", lines.filter((line) => line.kind === "evaluation")], ["warm start", lines.filter((line) => line.kind === "warm-start")]]
      .map(([label, from]) => [label, from.filter((line) => Number.isFinite(line[name])).map((line) => [line.step, line[name]])]).filter(([, points]) => points.length);
    return curves.length ? chart(WHAT[name] || name.replaceAll("_", " "), curves) : null;
  }));
}

// Round steps of 1, 2 or 5 that give about `n` ticks.
function ticks(low, high, n) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / n, power = 10 ** Math.floor(Math.log10(rough));
  const size = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let value = Math.ceil(low / size) * size; value <= high + size * 1e-6; value += size) found.push(Math.abs(value) < size * 1e-6 ? 0 : value);
  return found;
}

const tick = (value) => (value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential() : String(Number(value.toPrecision(6))));

export function chart(title, curves) {
  const W = 420, H = 200, L = 52, R = 12, T = 12, B = 30;
  const all = curves.flatMap(([, points]) => points);
  let [low, high] = [Math.min(...all.map(([, y]) => y)), Math.max(...all.map(([, y]) => y))];
  if (low >= 0) low = 0; // from 0, so that noise does not look like a trend
  const least = Math.max(Math.abs(low), Math.abs(high)) * 0.02 || 1;
  if (high - low < least) [low, high] = [(low + high) / 2 - least / 2, (low + high) / 2 + least / 2];
  const xs = all.map(([x]) => x);
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const px = (x) => L + ((W - L - R) * (x - first)) / (last - first || 1), py = (y) => T + (H - T - B) * (1 - (y - low) / (high - low));
  const read = h("span.read", {}, "");
  const graph = svg("svg", { class: "chart", viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${title} over training steps` });
  for (const value of ticks(low, high, 5)) graph.append(svg("line", { class: "grid", x1: L, x2: W - R, y1: py(value), y2: py(value) }), svg("text", { class: "tick", x: L - 6, y: py(value) + 4, "text-anchor": "end" }, tick(value)));
  for (const value of ticks(first, last, 6).filter(Number.isInteger)) graph.append(svg("line", { class: "axis", x1: px(value), x2: px(value), y1: H - B, y2: H - B + 4 }), svg("text", { class: "tick", x: px(value), y: H - B + 16, "text-anchor": "middle" }, String(value)));
  graph.append(svg("line", { class: "axis", x1: L, x2: W - R, y1: H - B, y2: H - B }), svg("line", { class: "axis", x1: L, x2: L, y1: T, y2: H - B }), svg("text", { class: "tick", x: W - R, y: H - 2, "text-anchor": "end" }, "step"));
  curves.forEach(([label, points], place) => {
    graph.append(svg("polyline", { class: `curve c${place}`, points: points.map(([x, y]) => `${px(x).toFixed(1)},${py(y).toFixed(1)}`).join(" ") }));
    if (points.length < 40 || place > 0) for (const [x, y] of points) graph.append(svg("circle", { class: `dot c${place}`, cx: px(x), cy: py(y), r: 2.4 }));
  });
  const mark = svg("line", { class: "cursor", y1: T, y2: H - B, x1: -9, x2: -9 });
  graph.append(mark);
  graph.addEventListener("pointermove", (event) => {
    const box = graph.getBoundingClientRect();
    const x = first + (((event.clientX - box.left) * W) / box.width - L) / ((W - L - R) / (last - first || 1));
    const near = curves.map(([label, points]) => [label, points.reduce((best, each) => (Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best))]);
    mark.setAttribute("x1", px(near[0][1][0]));
    mark.setAttribute("x2", px(near[0][1][0]));
    read.textContent = near.map(([label, [step, y]]) => `${curves.length > 1 ? `${label} ` : ""}${figure(y, 4)} at ${step}`).join(" · ");
  });
  return h("figure.card.chart-card", {}, h("figcaption", {}, h("b", {}, title), curves.length > 1 ? curves.map(([label], place) => h("span.key", {}, h(`i.c${place}`, {}), label)) : null, read), graph);
}
