// The last hour of the whole system in charts.

import { html, useState } from "../vendor/preact.js";
import { seconds } from "../api.js";
import { Chart, clock, rate } from "./chart.js";
import { useHistory } from "./history.js";
import { StateLink } from "./live.js";

const KEY = "antiphon-chart-range";
const RANGES = [[300, "5 min"], [900, "15 min"], [3600, "1 h"]];
const QUIET = "No requests in this time";
const share = (value) => `${Math.round(100 * value)} %`;
const EVENTS = { lost: "was lost", joined: "joined", draining: "began to end its work" };
const EVENTS_SHOWN = 6;
// Title, format, the names of the columns by what the chart calls them, and more of the chart.
const CHARTS = [
  ["Tokens per second", rate, { generated: "generated_tokens_per_s", prompt: "prompt_tokens_per_s" }, { silence: QUIET, wide: true }],
  ["Time to first token", seconds, { mean: "ttft_mean_s", "95 % below": "ttft_p95_s" }, { silence: QUIET }],
  ["Time between tokens", seconds, { mean: "itl_mean_s", "95 % below": "itl_p95_s" }, { silence: QUIET }],
  ["Requests per second", rate, { accepted: "requests_per_s", failed: "errors_per_s" }, { silence: QUIET }],
  ["Sequences in the engines", rate, { running: "running", waiting: "waiting" }, { silence: QUIET }],
  ["KV cache in use", share, { share: "kv_cache_share" }, { top: 1 }],
  ["Preemptions per second", rate, { preemptions: "preemptions_per_s" }, { silence: "No preemptions in this time" }],
];

// The length of time that all charts show, in seconds; kept for the tab.
export function useRange() {
  const [range, setRange] = useState(Number(sessionStorage.getItem(KEY)) || RANGES[0][0]);
  return [range, (value) => { sessionStorage.setItem(KEY, value); setRange(value); }];
}

export const Ranges = ({ range, setRange }) => html`<div class="ranges" role="group" aria-label="Time shown">${RANGES.map(([value, title]) => html`
  <button aria-pressed=${range === value ? "true" : "false"} onClick=${() => setRange(value)}>${title}</button>`)}</div>`;

// One chart for each entry of `charts`; `columns`: the series by their names.
export function ChartGrid({ history, charts, columns, range }) {
  const span = [history.now - range, history.now];
  const events = history.events.filter((one) => one.time >= span[0]);
  return html`<div class="chartgrid">${charts.map(([title, format, names, more = {}]) => html`<${Chart} key=${title} title=${title} format=${format} time=${history.time}
    range=${span} events=${events} series=${Object.fromEntries(Object.entries(names).map(([name, column]) => [name, columns[column] || []]))} ...${more} />`)}</div>
    ${events.length > 0 && html`<${Events} events=${events} />`}`;
}

const Events = ({ events }) => html`<section class="events"><h2>Events in this time</h2><ul>${events.slice(-EVENTS_SHOWN).reverse().map((one) => html`<li key=${`${one.time}${one.id}`}>
  <time>${clock(one.time)}</time> <span class="event ${one.kind}">${one.id} ${EVENTS[one.kind]}</span></li>`)}</ul>
  ${events.length > EVENTS_SHOWN && html`<p class="note">and ${events.length - EVENTS_SHOWN} earlier</p>`}</section>`;

export function Charts() {
  const { history, error } = useHistory();
  const [range, setRange] = useRange();
  return html`<div class="heading"><h1>Charts</h1><${Ranges} range=${range} setRange=${setRange} /></div>
    <${StateLink} />
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${!history && !error && html`<p class="loading">Reading…</p>`}
    ${history && html`<${ChartGrid} history=${history} charts=${CHARTS} columns=${history.series} range=${range} />
      <p class="note">Measured every ${history.interval_s} s by the gateway that answers this page; it keeps the last hour.
        ${" "}Point at a chart, or choose it and use the arrow keys, for the values of a moment.</p>`}`;
}
