// The list of recorded requests, with search; slow requests stand out.

import { html, useEffect, useState } from "./preact.js";
import { every, getJson, seconds } from "./api.js";
import { Legend, ORDER, PhaseBar, title } from "./phases.js";

const STATES = ["", "running", "completed", "failed", "cancelled"];
const NAMED = 5;
// Multiple of the usual time for each token from which the usual one is shown as well.
const MUCH = 1.5;
const RULE = "Slow: one phase took at least 3 times as long as usual, and at least 0.5 s and a fifth of the request's time longer. "
  + "Decode, prefill and tokenization are compared by their time for each token.";
// One unit and the same number of decimals in all rows, so that the longest number is the longest time.
const inSeconds = (value) => (value === null || value === undefined ? "–" : value.toFixed(3));

export function Requests() {
  const [query, setQuery] = useState({ q: "", state: "", sort: "newest", slow: false, all: false });
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const change = (name, value) => setQuery({ ...query, [name]: value });
  useEffect(() => every(2, async (signal) => {
    const parameters = new URLSearchParams({ limit: "100", sort: query.sort });
    for (const name of ["q", "state", "slow", "all"]) if (query[name]) parameters.set(name, query[name]);
    try {
      setFound(await getJson(`v1/requests?${parameters}`, signal));
      setError("");
    } catch (failure) { if (!signal.aborted) setError(failure.message); }
  }), [query]);
  return html`<h1>Requests</h1>
    <form class="bar" role="search" onSubmit=${(event) => event.preventDefault()}>
      <label class="wide">Search (id, key, model, engine, error, phase)<input type="search" value=${query.q}
        onInput=${(e) => change("q", e.target.value)} /></label>
      <label>State<select value=${query.state} onChange=${(e) => change("state", e.target.value)}>
        ${STATES.map((one) => html`<option value=${one}>${one || "any"}</option>`)}</select></label>
      <label>Order<select name="sort" value=${query.sort} onChange=${(e) => change("sort", e.target.value)}>
        <option value="newest">newest</option><option value="slowest">slowest</option></select></label>
      <label class="row"><input type="checkbox" name="slow" checked=${query.slow} onChange=${(e) => change("slow", e.target.checked)} />Only slow</label>
      <label class="row"><input type="checkbox" checked=${query.all} onChange=${(e) => change("all", e.target.checked)} />All keys</label>
    </form>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${found && html`<${Outliers} found=${found} />`}
    ${found?.data.length > 0 && html`<${Table} requests=${found.data} />`}
    ${found && found.data.length === 0 && html`<p class="note">No request matches.</p>`}
    ${found?.silent_gateways.length > 0 && html`<p class="error" role="alert">Without the requests of ${found.silent_gateways.join(", ")}, which did not answer.</p>`}
    ${found?.has_more && html`<p class="note">Only the first 100 are shown: search for others.</p>`}`;
}

const excess = (one) => one.slow?.excess_s || 0;
const standsOut = (one) => Number(one.slow?.stands_out || 0);
const perToken = (value) => (1000 * value).toFixed(value < 0.01 ? 1 : 0);

// What is much slower than usual, the slowest one first.
function Outliers({ found: { data, num_slow: count = 0 } }) {
  if (!count) return data.length ? html`<p class="note outliers">None of these requests was much slower than usual. ${RULE}</p>` : null;
  const slow = data.filter((one) => one.slow).sort((a, b) => standsOut(b) - standsOut(a) || excess(b) - excess(a));
  const left = count - Math.min(slow.length, NAMED);
  return html`<div class="outliers card slow">
    <strong>${count === 1 ? "One request was" : `${count} requests were`} much slower than usual</strong>
    <ul>${slow.slice(0, NAMED).map((one) => html`<li><a class="mono" href="#/requests/${one.id}">${one.client_request_id || one.id}</a>${" "}
      <${Slow} slow=${one.slow} />${" "}<span class="note">instead of ${one.slow.usual_s < 0.001 ? "under 1 ms" : seconds(one.slow.usual_s)}; ${one.duration_s.toFixed(1)} s in all</span></li>`)}</ul>
    ${left > 0 && html`<span class="note">and ${left} more</span>`}
    <p class="note rule">${RULE}</p></div>`;
}

const Slow = ({ slow }) => html`<span class="badge ${slow.stands_out ? "most" : ""}">slow: ${title(slow.phase)} ${slow.duration_s.toFixed(1)} s</span>`;

// The longest phase of a request that was not slow. A long decode has its time for each token, which tells a slow one from a long output.
function Longest({ one }) {
  const text = title(one.longest_phase || "");
  if (one.longest_phase !== "decode" || !one.token_s) return html`<span class="note">${text}</span>`;
  const usual = one.usual_token_s && one.token_s >= MUCH * one.usual_token_s ? ` (usual ${perToken(one.usual_token_s)})` : "";
  return html`<span class="note">${text}, ${perToken(one.token_s)} ms a token${usual}</span>`;
}

function Table({ requests }) {
  const longest = Math.max(1e-6, ...requests.map((one) => one.duration_s));
  const hasNotes = requests.some(notes);
  const used = ORDER.filter((phase) => requests.some((one) => one.phases?.[phase] !== undefined));
  return html`<${Legend} phases=${used} />
    <div class="scroll" tabindex="0" role="region" aria-label="Requests"><table class="requests">
      <thead><tr><th>Client's id, or own</th><th>Key</th><th>Received</th><th>State</th><th class="number">Duration,\u00a0s</th><th>Phases</th>
        <th>Longest phase</th><th class="number">First token,\u00a0s</th><th class="number">Prompt</th><th class="number">Output</th><th>Engines</th>
        ${hasNotes && html`<th>Notes</th>`}</tr></thead>
      <tbody>${requests.map((one) => html`<tr key=${one.id} class=${one.slow ? `slow ${one.slow.stands_out ? "most" : ""}` : ""}>
        <td>${!one.client_request_id && html`<span class="note">own </span>`}<a class="mono" href="#/requests/${one.id}"
          title="own id ${one.id}">${one.client_request_id || one.id}</a></td>
        <td>${one.key}</td>
        <td>${new Date(1000 * one.created).toLocaleTimeString([], { hourCycle: "h23" })}</td>
        <td class="state-${one.state}">${one.state}</td>
        <td class="number duration">${inSeconds(one.duration_s)}</td>
        <td><${PhaseBar} phases=${one.phases || {}} whole=${longest} /></td>
        <td>${one.slow ? html`<${Slow} slow=${one.slow} />` : html`<${Longest} one=${one} />`}</td>
        <td class="number">${inSeconds(one.time_to_first_token_s)}</td>
        <td class="number">${one.prompt_tokens}</td><td class="number">${one.completion_tokens}</td>
        <td>${one.engines.join(", ")}</td>${hasNotes && html`<td>${notes(one)}</td>`}
      </tr>`)}</tbody>
    </table></div>`;
}

function notes(one) {
  const parts = [one.error_code, one.moves && `moved ${one.moves}×`, one.preemptions && `preempted ${one.preemptions}×`];
  return parts.filter(Boolean).join(", ");
}
