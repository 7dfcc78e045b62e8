// One engine: its batch, block pool, prefix cache and preemptions over time, and the requests that it computes.

import { html, useEffect, useRef, useState } from "./preact.js";
import { ApiError, every, getJson, seconds } from "./api.js";
import { Chart, POINTS, rate } from "./chart.js";

const whole = (value) => value.toFixed(0);
const share = (value) => `${(100 * value).toFixed(0)} %`;
// Title, format, and the series from the load now (n) and its changes (d) in `s` seconds.
const CHARTS = [
  ["Sequences", whole, (n) => ({ running: n.num_running, waiting: n.num_waiting })],
  ["KV blocks", whole, (n) => ({ "in use": n.num_blocks - n.num_free_blocks, free: n.num_free_blocks })],
  ["Tokens per second", rate, (n, d, s) => ({ generated: d.generation_tokens / s, prompt: d.prompt_tokens / s })],
  ["Steps per second", rate, (n, d, s) => ({ steps: d.step / s })],
  ["New tokens per step", rate, (n, d) => ({ generated: d.step ? d.generation_tokens / d.step : null })],
  ["Prefix cache hits", share, (n, d) => ({ hits: d.prefix_cache_queries ? d.prefix_cache_hits / d.prefix_cache_queries : null })],
  ["Preemptions per second", rate, (n, d, s) => ({ preemptions: d.preemptions / s })],
  ["Blocks swapped per second", rate, (n, d, s) => ({ out: d.swapped_out_blocks / s, in: d.swapped_in_blocks / s })],
];
const COUNTERS = ["step", "generation_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions",
  "swapped_out_blocks", "swapped_in_blocks"];

export function Engine({ name }) {
  const [now, setNow] = useState(null);
  const [points, setPoints] = useState([]);
  const [error, setError] = useState("");
  const last = useRef(null);
  useEffect(() => every(1, async (signal) => {
    try {
      const found = await getJson("admin/topology", signal);
      const engine = found.members.find((one) => one.service === "engine" && one.id === name);
      if (!engine) { setError(`The engine ${name} is not running.`); last.current = null; return; }
      // Counters begin again in a new process.
      const before = last.current?.engine.instance_id === engine.instance_id ? last.current : null;
      if (before && found.now_s > before.at) {
        const change = Object.fromEntries(COUNTERS.map((one) => [one, Math.max(0, engine.load[one] - before.engine.load[one])]));
        const point = CHARTS.map(([, , read]) => read(engine.load, change, found.now_s - before.at));
        setPoints((earlier) => [...earlier, point].slice(-POINTS));
      }
      last.current = { engine, at: found.now_s };
      setNow(engine); setError("");
    } catch (failure) { if (!signal.aborted) setError(failure.message); }
  }), [name]);
  return html`<h1>Engine <span class="mono">${name}</span> ${now && html`<span class="state-${now.state}">${now.state}</span>`}</h1>
    <p><a href="#/topology">All processes</a></p>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${!now && !error && html`<p class="loading">Reading…</p>`}
    ${now && html`<${Pool} load=${now.load} />
      <div class="charts">${CHARTS.map(([title, format], index) => html`<${Chart} key=${title} title=${title} format=${format}
        points=${points.map((one) => one[index])} />`)}</div>
      <${Running} name=${name} />
      <${Facts} engine=${now} />`}`;
}

function Pool({ load }) {
  const used = load.num_blocks - load.num_free_blocks;
  return html`<h2>Block pool</h2>
    <meter min="0" max=${load.num_blocks} high=${0.9 * load.num_blocks} value=${used} aria-label="KV blocks in use"></meter>
    <p class="note">${used} of ${load.num_blocks} blocks of ${load.block_size} tokens are in use: ${used * load.block_size} of
      ${" "}${load.num_blocks * load.block_size} tokens. The batch has ${load.num_running} of ${load.max_num_seqs} sequences.</p>`;
}

function Running({ name }) {
  const [found, setFound] = useState([]);
  const all = useRef("&all=true");
  useEffect(() => every(2, async (signal) => {
    const read = () => getJson(`v1/requests?limit=100&state=running&q=${encodeURIComponent(name)}${all.current}`, signal);
    try {
      setFound((await read()).data);
    } catch (failure) {
      // A key without the scope admin sees its own requests; without records there are none to show.
      if (failure instanceof ApiError && failure.status === 403 && all.current) all.current = "";
      else if (!signal.aborted) setFound([]);
    }
  }), [name]);
  return html`<h2>Requests in the batch or its queue (${found.length})</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="Requests of the engine"><table><thead><tr><th>Request</th>
      <th class="number">For</th><th class="number">Prompt</th><th class="number">From the cache</th><th class="number">Output</th><th>Phase</th></tr></thead>
    <tbody>${found.map((one) => html`<tr key=${one.id}><td><a class="mono" href="#/requests/${one.id}">${one.client_request_id || one.id}</a></td>
      <td class="number">${seconds(one.duration_s)}</td><td class="number">${one.prompt_tokens}</td><td class="number">${one.cached_tokens}</td>
      <td class="number">${one.completion_tokens}${one.max_tokens ? ` of ${one.max_tokens}` : ""}</td>
      <td>${(one.longest_phase || "").replace("_", " ")}</td></tr>`)}</tbody></table></div>`;
}

function Facts({ engine: { load, instance_id } }) {
  const hits = load.prefix_cache_queries ? share(load.prefix_cache_hits / load.prefix_cache_queries) : null;
  const drafts = load.drafted_tokens ? `${share(load.accepted_tokens / load.drafted_tokens)} of ${load.drafted_tokens} drafted tokens` : null;
  const rows = [["model", load.model], ["path", load.model_path], ["role", load.role], ["context", `${load.max_model_len} tokens`],
    ["configuration", load.configuration], ["instance", instance_id], ["steps", load.step], ["prompt tokens", load.prompt_tokens],
    ["taken from the cache", load.cached_tokens], ["generated tokens", load.generation_tokens], ["prefix hits", hits], ["accepted drafts", drafts],
    ["preemptions", load.preemptions], ["ended", load.finished.map(([reason, count]) => `${reason} ${count}`).join(", ")]];
  return html`<h2>Since its start</h2><dl class="card">${rows.filter(([, value]) => value !== null && value !== "").map(([title, value]) => html`<dt>${title}</dt><dd>${value}</dd>`)}</dl>`;
}
