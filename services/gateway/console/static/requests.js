// The list of recorded requests, with search.

import { html, useEffect, useState } from "./preact.js";
import { every, getJson, seconds } from "./api.js";

const STATES = ["", "running", "completed", "failed", "cancelled"];

export function Requests() {
  const [query, setQuery] = useState({ q: "", state: "", sort: "newest", all: false });
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const change = (name, value) => setQuery({ ...query, [name]: value });
  useEffect(() => every(2, async (signal) => {
    const parameters = new URLSearchParams({ limit: "100", sort: query.sort });
    for (const name of ["q", "state"]) if (query[name]) parameters.set(name, query[name]);
    if (query.all) parameters.set("all", "true");
    try {
      setFound(await getJson(`v1/requests?${parameters}`, signal));
      setError("");
    } catch (failure) { if (!signal.aborted) setError(failure.message); }
  }), [query]);
  return html`<h1>Requests</h1>
    <form class="bar" role="search" onSubmit=${(event) => event.preventDefault()}>
      <label class="wide">Search (id, model, engine, error, phase)<input type="search" value=${query.q}
        onInput=${(e) => change("q", e.target.value)} /></label>
      <label>State<select value=${query.state} onChange=${(e) => change("state", e.target.value)}>
        ${STATES.map((one) => html`<option value=${one}>${one || "any"}</option>`)}</select></label>
      <label>Order<select value=${query.sort} onChange=${(e) => change("sort", e.target.value)}>
        <option value="newest">newest</option><option value="slowest">slowest</option></select></label>
      <label class="row"><input type="checkbox" checked=${query.all} onChange=${(e) => change("all", e.target.checked)} />All keys</label>
    </form>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <div class="scroll" tabindex="0" role="region" aria-label="Requests"><table>
      <thead><tr><th>Request</th><th>State</th><th>Time</th><th class="number">Duration</th><th class="number">First token</th>
        <th class="number">Prompt</th><th class="number">Output</th><th>Longest phase</th><th>Engines</th><th>Notes</th></tr></thead>
      <tbody>${(found?.data || []).map((one) => html`<tr key=${one.id}>
        <td><a class="mono" href="#/requests/${one.id}">${one.client_request_id || one.id}</a></td>
        <td class="state-${one.state}">${one.state}</td>
        <td>${new Date(1000 * one.created).toLocaleTimeString()}</td>
        <td class="number">${seconds(one.duration_s)}</td><td class="number">${seconds(one.time_to_first_token_s)}</td>
        <td class="number">${one.prompt_tokens}</td><td class="number">${one.completion_tokens}</td>
        <td>${(one.longest_phase || "").replace("_", " ")}</td><td>${one.engines.join(", ")}</td><td>${notes(one)}</td>
      </tr>`)}</tbody>
    </table></div>
    ${found && found.data.length === 0 && html`<p class="note">No request matches.</p>`}
    ${found?.silent_gateways.length > 0 && html`<p class="error" role="alert">Without the requests of ${found.silent_gateways.join(", ")}, which did not answer.</p>`}
    ${found?.has_more && html`<p class="note">Only the first 100 are shown: search for others.</p>`}`;
}

function notes(one) {
  const parts = [one.error_code, one.moves && `moved ${one.moves}×`, one.preemptions && `preempted ${one.preemptions}×`];
  return parts.filter(Boolean).join(", ");
}
