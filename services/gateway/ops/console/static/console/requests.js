// The list of recorded requests, with search: a table, on phones a card for each. Failures are red; slow requests have a calm mark.

import { html, useEffect, useState } from "../vendor/preact.js";
import { every, getJson, seconds } from "../api.js";
import { StateLink } from "./live.js";
import { Legend, ORDER, PhaseBar, title } from "./phases.js";
import { plural } from "./state.js";

const STATES = ["", "running", "completed", "failed", "cancelled"];
const NARROW = "(max-width: 760px)";
const NAMED = 5;
// Failures of this last time are told above the list.
const RECENT_S = 600;
// Multiple of the usual time for each token from which the usual one is shown as well.
const MUCH = 1.5;
const RULE = "Slow: one phase took at least 3 times as long as usual, and at least 0.5 s and a fifth of the request's time longer. "
  + "Decode, prefill and tokenization are compared by their time for each token.";
// One unit and the same number of decimals in all rows, so that the longest number is the longest time.
const inSeconds = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));
const clock = (created) => new Date(1000 * created).toLocaleTimeString([], { hourCycle: "h23" });

export function Requests() {
  const [query, setQuery] = useState({ q: "", state: "", sort: "newest", slow: false, all: false });
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const narrow = useMedia(NARROW);
  const change = (name, value) => setQuery({ ...query, [name]: value });
  useEffect(() => every(2, async (signal) => {
    const parameters = new URLSearchParams({ limit: "100", sort: query.sort });
    for (const name of ["q", "state", "slow", "all"]) if (query[name]) parameters.set(name, query[name]);
    try {
      setFound(await getJson(`v1/requests?${parameters}`, signal));
      setError("");
    } catch (failure) { if (!signal.aborted) setError(failure.message); }
  }), [query]);
  const isFiltered = query.q || query.state || query.slow;
  return html`<h1>Requests</h1>
    <${StateLink} />
    <form class="bar filters" role="search" onSubmit=${(event) => event.preventDefault()}>
      <label class="wide">Search<input type="search" placeholder="id, key, model, engine, error, phase" value=${query.q}
        onInput=${(e) => change("q", e.target.value)} /></label>
      <label>State<select value=${query.state} onChange=${(e) => change("state", e.target.value)}>
        ${STATES.map((one) => html`<option value=${one}>${one || "any"}</option>`)}</select></label>
      <label>Order<select name="sort" value=${query.sort} onChange=${(e) => change("sort", e.target.value)}>
        <option value="newest">newest</option><option value="slowest">slowest</option></select></label>
      <label class="row"><input type="checkbox" name="slow" checked=${query.slow} onChange=${(e) => change("slow", e.target.checked)} />Only slow</label>
      <label class="row"><input type="checkbox" checked=${query.all} onChange=${(e) => change("all", e.target.checked)} />All keys</label>
    </form>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${found?.silent_gateways.length > 0 && html`<p class="error" role="alert">Without the requests of ${found.silent_gateways.join(", ")}, which did not answer.</p>`}
    ${found && html`<${Failures} data=${found.data} /><${Outliers} found=${found} />`}
    ${found?.data.length > 0 && html`<${List} requests=${found.data} narrow=${narrow} />`}
    ${found && found.data.length === 0 && html`<div class="blank"><strong>${isFiltered ? "No request matches" : "No requests yet"}</strong>
      <p>${isFiltered ? "Search for less, or choose any state."
        : html`Requests to this server appear here with their times, while they run and afterwards. Send one in the <a href="#/chat">chat</a>.`}</p></div>`}
    ${found?.has_more && html`<p class="note">Only the first 100 are shown: search for others.</p>`}`;
}

function useMedia(query) {
  const [matches, setMatches] = useState(matchMedia(query).matches);
  useEffect(() => {
    const asked = matchMedia(query), follow = () => setMatches(asked.matches);
    asked.addEventListener("change", follow);
    return () => asked.removeEventListener("change", follow);
  }, [query]);
  return matches;
}

// Requests that failed a short while ago, by their reasons.
function Failures({ data }) {
  const failed = data.filter((one) => one.state === "failed" && one.created > Date.now() / 1000 - RECENT_S);
  if (!failed.length) return null;
  const reasons = new Map();
  for (const one of failed) reasons.set(one.error_code || "unknown", (reasons.get(one.error_code || "unknown") || 0) + 1);
  return html`<div class="failures"><strong>${plural(failed.length, "request")} failed in the last 10 minutes</strong>
    <span>${[...reasons].map(([reason, count]) => (count > 1 ? `${reason} (${count})` : reason)).join(", ")}</span></div>`;
}

const excess = (one) => one.slow?.excess_s || 0;
const standsOut = (one) => Number(one.slow?.stands_out || 0);
const perToken = (value) => (1000 * value).toFixed(value < 0.01 ? 1 : 0);

// What is slower than usual in one line, which opens to the names, the slowest first.
function Outliers({ found: { data, num_slow: count = 0 } }) {
  if (!count) return null;
  const slow = data.filter((one) => one.slow).sort((a, b) => standsOut(b) - standsOut(a) || excess(b) - excess(a));
  const left = count - Math.min(slow.length, NAMED);
  return html`<details class="outliers"><summary>${count === 1 ? "One request was" : `${count} requests were`} slower than usual</summary>
    <ul>${slow.slice(0, NAMED).map((one) => html`<li><a class="mono" href="#/requests/${one.id}">${one.client_request_id || one.id}</a>${" "}
      <${Slow} slow=${one.slow} />${" "}<span class="note">instead of ${one.slow.usual_s < 0.001 ? "under 1 ms" : seconds(one.slow.usual_s)}; ${one.duration_s.toFixed(1)} s in all</span></li>`)}</ul>
    ${left > 0 && html`<span class="note">and ${left} more</span>`}
    <p class="note rule">${RULE}</p></details>`;
}

const Slow = ({ slow }) => html`<span class="badge ${slow.stands_out ? "most" : ""}">slow: ${title(slow.phase)} ${slow.duration_s.toFixed(1)} s</span>`;

// The longest phase of a request that was not slow. A long decode has its time for each token, which tells a slow one from a long output.
function Longest({ one }) {
  if (one.slow) return html`<${Slow} slow=${one.slow} />`;
  const text = title(one.longest_phase || "");
  if (one.longest_phase !== "decode" || !one.token_s) return html`<span class="note">${text}</span>`;
  const usual = one.usual_token_s && one.token_s >= MUCH * one.usual_token_s ? ` (usual ${perToken(one.usual_token_s)})` : "";
  return html`<span class="note">${text}, ${perToken(one.token_s)} ms a token${usual}</span>`;
}

function List({ requests, narrow }) {
  const longest = Math.max(1e-6, ...requests.map((one) => one.duration_s));
  const used = ORDER.filter((phase) => requests.some((one) => one.phases?.[phase] !== undefined));
  const hasKeys = requests.some((one) => one.key !== requests[0].key);
  const Shown = narrow ? Cards : Table;
  return html`<${Legend} phases=${used} /><${Shown} requests=${requests} longest=${longest} hasKeys=${hasKeys} />`;
}

function Table({ requests, longest, hasKeys }) {
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Requests"><table class="requesttable">
      <thead><tr><th>Received</th><th>State</th><th>Request</th><th class="number">Took,\u00a0s</th><th>Phases</th>
        <th class="number">First token, s</th><th class="number">Tokens in</th><th class="number">out</th><th>Engines</th></tr></thead>
      <tbody>${requests.map((one) => html`<tr key=${one.id} class=${classOf(one)}>
        <td><time>${clock(one.created)}</time></td><td><${State} one=${one} /></td>
        <td class="id"><${Name} one=${one} />${hasKeys && html`<small>key ${one.key}</small>`}</td>
        <td class="number duration">${inSeconds(one.duration_s)}</td>
        <td class="phase"><${PhaseBar} phases=${one.phases || {}} whole=${longest} /><${Longest} one=${one} /></td>
        <td class="number">${inSeconds(one.time_to_first_token_s)}</td>
        <td class="number">${one.prompt_tokens}</td><td class="number">${one.completion_tokens}</td>
        <td class="engines">${one.engines.map((name) => html`<span>${name}</span>${" "}`)}</td>
      </tr>`)}</tbody>
    </table></div>`;
}

const Cards = ({ requests, longest, hasKeys }) => html`<ul class="requestcards" aria-label="Requests">${requests.map((one) => html`<li key=${one.id} class="card ${classOf(one)}">
    <p class="first"><time>${clock(one.created)}</time><${State} one=${one} /><span class="duration">${inSeconds(one.duration_s)} s</span></p>
    <p class="id"><${Name} one=${one} /></p>
    <div class="phase"><${PhaseBar} phases=${one.phases || {}} whole=${longest} /><${Longest} one=${one} /></div>
    <p class="note">${one.prompt_tokens} tokens in, ${one.completion_tokens} out${one.time_to_first_token_s === null ? "" : `, the first after ${inSeconds(one.time_to_first_token_s)} s`}
      ${one.engines.map((name) => html` · <span class="whole">${name}</span>`)}${hasKeys ? ` · key ${one.key}` : ""}</p></li>`)}</ul>`;

const classOf = (one) => (one.slow ? `slow ${one.slow.stands_out ? "most" : ""}` : "");

function State({ one }) {
  const parts = [one.error_code, one.moves && `moved ${one.moves}×`, one.preemptions && `preempted ${one.preemptions}×`].filter(Boolean);
  return html`<span class="statecell"><span class="state-${one.state}">${one.state}</span>${parts.length > 0 && html`<small>${parts.join(", ")}</small>`}</span>`;
}

// The client's id, else the server's, whole, and a button that copies it.
function Name({ one }) {
  const id = one.client_request_id || one.id;
  const [copied, setCopied] = useState(false);
  useEffect(() => {
    if (!copied) return undefined;
    const timer = setTimeout(() => setCopied(false), 2000);
    return () => clearTimeout(timer);
  }, [copied]);
  const whose = one.client_request_id ? `the client's id; the server's is ${one.id}` : "the server's id";
  return html`<a class="mono" href="#/requests/${one.id}" title=${whose}>${id}</a>
    <button class="copy" aria-label="Copy the id ${id}" title="Copy the id" onClick=${async () => setCopied(await copy(id))}><svg width="14" height="14" viewBox="0 0 14 14" aria-hidden="true">
      ${copied ? html`<path d="M2 7.5l3.5 3.5L12 3.5" />` : html`<rect x="4.5" y="4.5" width="8" height="8" rx="1.5" /><path d="M9.5 4.5V3A1.5 1.5 0 0 0 8 1.5H3A1.5 1.5 0 0 0 1.5 3V8A1.5 1.5 0 0 0 3 9.5H4.5" />`}</svg></button>`;
}

// Returns whether the text is on the clipboard. Pages without TLS on another host have only the older way.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const field = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
