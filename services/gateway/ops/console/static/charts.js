// Live charts from the gateway's own /metrics: the differences between two readings.

import { html, useEffect, useRef, useState } from "./preact.js";
import { every, getText, seconds } from "./api.js";
import { Chart, POINTS, rate } from "./chart.js";

const INTERVAL_S = 2;
const LINE = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const CHARTS = [
  ["Time to first token", seconds, (d) => d.quantiles("vllm:time_to_first_token_seconds")],
  ["Inter-token latency", seconds, (d) => d.quantiles("vllm:inter_token_latency_seconds")],
  ["Tokens per second", rate, (d) => ({ generated: d.rate("vllm:generation_tokens_total"), prompt: d.rate("vllm:prompt_tokens_total") })],
  ["Sequences in the engines", rate, (d) => ({ running: d.now("vllm:num_requests_running"), waiting: d.now("vllm:num_requests_waiting") })],
  ["KV cache in use", (value) => `${(100 * value).toFixed(0)} %`, (d) => ({ share: d.most("vllm:kv_cache_usage_perc") })],
  ["Preemptions per second", rate, (d) => ({ preemptions: d.rate("vllm:num_preemptions_total") })],
];

// Reads Prometheus's text format into a list of samples for each name.
export function parse(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    if (!found.has(match[1])) found.set(match[1], []);
    found.get(match[1]).push([match[2] || "", Number(match[3])]);
  }
  return found;
}

class Difference {
  constructor(before, after, elapsed) { Object.assign(this, { before, after, elapsed }); }
  now(name) { return this.values(name).reduce((sum, value) => sum + value, 0); }
  most(name) { return Math.max(0, ...this.values(name)); }
  values(name) { return (this.after.get(name) || []).map(([, value]) => value); }
  change(name, keep = () => true) {
    const sum = (samples) => (samples.get(name) || []).filter(([labels]) => keep(labels)).reduce((total, [, value]) => total + value, 0);
    return Math.max(0, sum(this.after) - sum(this.before));
  }
  rate(name) { return this.change(name) / this.elapsed; }
  quantiles(name) {
    const count = this.change(`${name}_count`);
    if (!count) return { mean: null, "95 %": null };
    const bounds = [...new Set((this.after.get(`${name}_bucket`) || []).map(([labels]) => /le="([^"]+)"/.exec(labels)[1]))];
    const high = bounds.find((bound) => this.change(`${name}_bucket`, (labels) => labels.includes(`le="${bound}"`)) >= 0.95 * count);
    const mean = this.change(`${name}_sum`) / count;
    // The quantile is the upper bound of its bucket.
    return { mean, "95 %": high === undefined || high === "+Inf" ? mean : Math.max(mean, Number(high)) };
  }
}

export function Charts() {
  const last = useRef(null);
  const [points, setPoints] = useState([]);
  const [error, setError] = useState("");
  useEffect(() => every(INTERVAL_S, async (signal) => {
    try {
      const after = parse(await getText("metrics", signal));
      const at = performance.now() / 1000;
      if (last.current) {
        const difference = new Difference(last.current.samples, after, at - last.current.at);
        const point = CHARTS.map(([, , read]) => read(difference));
        setPoints((before) => [...before, point].slice(-POINTS));
      }
      last.current = { samples: after, at };
      setError("");
    } catch (failure) { if (!signal.aborted) setError(failure.message); }
  }), []);
  return html`<h1>Charts</h1>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <p class="note">The last ${POINTS * INTERVAL_S / 60} minutes of the gateway that answers this page, and of all engines.</p>
    <div class="charts">${CHARTS.map(([title, format], index) => html`<${Chart} key=${title} title=${title} format=${format} points=${points.map((one) => one[index])} />`)}</div>`;
}
