// One engine: its work over the last hour, what it holds now, and the requests that it computes.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { ApiError, every, getJson, seconds } from "../api.js";
import { rate } from "./chart.js";
import { ChartGrid, Ranges, useRange } from "./charts.js";
import { useHistory } from "./history.js";
import { problem, useLive } from "./live.js";
import { FactList } from "./overview.js";
import { bytes, numbersOf, percent } from "./picture.js";
import { ago, goneOf } from "./state.js";

const QUIET = "No requests in this time";
// Title, format, the names of the columns by what the chart calls them, and more of the chart.
const CHARTS = [
  ["Tokens per second", rate, { generated: "generated_tokens_per_s", prompt: "prompt_tokens_per_s" }, { silence: QUIET, wide: true }],
  ["Sequences", rate, { running: "running", waiting: "waiting" }, { silence: QUIET }],
  ["Steps per second", rate, { steps: "steps_per_s" }, { silence: QUIET }],
  ["KV cache in use", percent, { share: "kv_share" }, { top: 1 }],
  ["Prompt tokens from the prefix cache", percent, { share: "prefix_hit_share" }, { silence: "No prompts found in the cache in this time", top: 1 }],
  ["Preemptions per second", rate, { preemptions: "preemptions_per_s" }, { silence: "No preemptions in this time" }],
  ["KV blocks swapped per second", rate, { out: "swapped_out_per_s", in: "swapped_in_per_s" }, { silence: "No blocks were swapped in this time" }],
];

export function Engine({ name }) {
  const { now, rates, error } = useLive();
  const { history, error: unread } = useHistory();
  const [range, setRange] = useRange();
  const engine = now?.members.find((one) => one.service === "engine" && one.id === name);
  const lost = now && goneOf(now).find((one) => one.id === name);
  const measured = history?.engines[name];
  const columns = useMemo(() => measured && { ...measured, kv_share: shares(measured) }, [measured]);
  return html`<p class="crumb"><a href="#/overview">Overview</a></p>
    <div class="heading"><h1>${name} ${engine && html`<small class="state-${engine.state}">${engine.state}</small>`}</h1>
      <${Ranges} range=${range} setRange=${setRange} /></div>
    ${(error || unread) && html`<p class="error" role="alert">${error ? problem(error) : unread}</p>`}
    ${!now && !error && html`<p class="loading">Reading…</p>`}
    ${now && !engine && html`<p class="system bad"><span class="lamp" aria-hidden="true"></span>
      <span>${lost ? `${name} was lost ${ago(lost.age_s)} ago.` : `The engine ${name} is not running.`}</span></p>`}
    ${engine && html`<${Now} engine=${engine} rates=${rates} />`}
    ${columns && html`<${ChartGrid} history=${history} charts=${CHARTS} columns=${columns} range=${range} />`}
    ${engine && html`<${Running} name=${name} /><${Facts} engine=${engine} />`}`;
}

const shares = ({ used_blocks: used = [], free_blocks: free = [] }) => used
  .map((value, index) => (value === null || !(value + free[index]) ? null : value / (value + free[index])));

// What the engine does and holds at this moment, as a row of figures.
function Now({ engine, rates }) {
  const { load, resources } = engine;
  const used = load.num_blocks - load.num_free_blocks;
  const cpu = rates.get(engine.instance_id)?.cpu;
  const tokens = (blocks) => (blocks * load.block_size).toLocaleString("en");
  const figures = [["now", numbersOf("engine", [engine], rates)[0], ""],
    ["running", load.num_running, `of ${load.max_num_seqs} places`], ["waiting", load.num_waiting, ""],
    ["KV cache", load.num_blocks ? percent(used / load.num_blocks) : null, `${tokens(used)} of ${tokens(load.num_blocks)} tokens`],
    ["CPU", cpu === null || cpu === undefined ? null : percent(cpu), resources && `of ${resources.num_cores} cores`], ["memory", resources && bytes(resources.rss_bytes), ""],
    ...(resources?.gpus || []).map((gpu) => [`GPU ${gpu.index}`, bytes(gpu.used_bytes), `of ${bytes(gpu.total_bytes)}, ${gpu.name}`])];
  const known = figures.filter(([, value]) => value !== null && value !== undefined);
  return html`<ul class="figures">${known.map(([title, value, more]) => html`<li>
      <span class="title">${title}</span><strong>${value}</strong><span class="note">${more}</span></li>`)}</ul>
    ${load.num_blocks > 0 && html`<meter min="0" max=${load.num_blocks} high=${0.9 * load.num_blocks} value=${used} aria-label="KV blocks in use"></meter>`}`;
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
  const hits = load.prefix_cache_queries ? percent(load.prefix_cache_hits / load.prefix_cache_queries) : null;
  const drafts = load.drafted_tokens ? `${percent(load.accepted_tokens / load.drafted_tokens)} of ${load.drafted_tokens} drafted tokens` : null;
  const role = { prefill: "computes prompts for others", decode: "generates after prompts of others" }[load.role];
  const rows = [["model", load.model], ["path of the model", load.model_path], ["role", role], ["longest context", `${load.max_model_len} tokens`],
    ["prompt tokens", load.prompt_tokens], ["of these from the cache", load.cached_tokens], ["generated tokens", load.generation_tokens], ["steps", load.step],
    ["prefixes found in the cache", hits], ["accepted drafts", drafts], ["preemptions", load.preemptions],
    ["ended sequences", load.finished.map(([reason, count]) => `${reason} ${count}`).join(", ")], ["configuration", load.configuration], ["id of this start", instance_id]];
  return html`<h2>Since its start</h2><${FactList} rows=${rows} />`;
}
