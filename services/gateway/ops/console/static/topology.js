// Every running process: its state, load, heartbeat, and messages per second.

import { html, useEffect, useRef, useState } from "./preact.js";
import { every, getJson, seconds } from "./api.js";

const SERVICES = ["gateway", "tokenizer", "engine", "detokenizer"];
const SHOWN = {
  gateway: [["num_requests", "requests"], ["num_waiting", "waiting sequences"]],
  tokenizer: [["model", "model"], ["num_requests", "requests so far"]],
  engine: [["model", "model"], ["num_running", "running"], ["num_waiting", "waiting"], ["credits", "credits"],
    ["preemptions", "preemptions"]],
  detokenizer: [["model", "model"], ["num_streams", "streams"], ["resends", "resends"]],
};

// Returns the differences per second to the answer before, by instance.
function rates(before, now) {
  const elapsed = before ? now.now_s - before.now_s : 0;
  const earlier = new Map((before?.members || []).map((one) => [one.instance_id, one]));
  return new Map(now.members.map((one) => {
    const old = earlier.get(one.instance_id);
    const rate = (value) => (old && elapsed > 0 ? Math.max(0, value(one) - value(old)) / elapsed : null);
    return [one.instance_id, {
      messages: rate((each) => each.messages_received + each.messages_sent),
      tokens: rate((each) => each.load.generation_tokens || 0),
    }];
  }));
}

export function Topology() {
  const [now, setNow] = useState(null);
  const [error, setError] = useState("");
  const before = useRef(null);
  const [speeds, setSpeeds] = useState(new Map());
  useEffect(() => every(1, async (signal) => {
    try {
      const found = await getJson("admin/topology", signal);
      setSpeeds(rates(before.current, found));
      before.current = found;
      setNow(found); setError("");
    } catch (failure) { if (!signal.aborted) setError(failure.message); }
  }), []);
  return html`<h1>Topology</h1>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${!now && !error && html`<p class="loading">Reading…</p>`}
    ${now && SERVICES.map((service) => {
      const members = now.members.filter((one) => one.service === service);
      return html`<h2>${service}s (${members.length})</h2>
        <div class="cards">${members.map((one) => html`<${Member} key=${one.instance_id} one=${one} speed=${speeds.get(one.instance_id)} />`)}</div>
        ${members.length === 0 && html`<p class="error">No ${service} is running.</p>`}`;
    })}`;
}

function Member({ one, speed }) {
  const { load } = one;
  const used = load.num_blocks ? 1 - load.num_free_blocks / load.num_blocks : 0;
  const late = one.heartbeat_age_s > 2 * one.heartbeat_interval_s;
  const number = (value) => (value === null || value === undefined ? "–" : value.toFixed(value < 10 ? 1 : 0));
  return html`<section class="card" aria-label=${one.id}>
    <h3>${one.service === "engine" ? html`<a href="#/topology/${encodeURIComponent(one.id)}">${one.id}</a>` : html`<span>${one.id}</span>`}<span class="state-${one.state}">${one.state}</span></h3>
    <dl>
      <dt>heartbeat</dt><dd class=${late ? "state-failed" : ""}>${seconds(one.heartbeat_age_s)} ago</dd>
      <dt>messages/s</dt><dd>${number(speed?.messages)}</dd>
      ${one.service === "engine" && html`<dt>tokens/s</dt><dd>${number(speed?.tokens)}</dd>`}
      ${SHOWN[one.service].map(([name, title]) => html`<dt>${title}</dt><dd>${load[name]}</dd>`)}
      ${load.num_blocks > 0 && html`<dt>KV blocks</dt><dd>${load.num_blocks - load.num_free_blocks} of ${load.num_blocks}</dd>`}
      ${load.prefix_cache_queries > 0 && html`<dt>prefix hits</dt>
        <dd>${(100 * load.prefix_cache_hits / load.prefix_cache_queries).toFixed(0)} %</dd>`}
      <dt>instance</dt><dd class="mono">${one.instance_id}</dd>
    </dl>
    ${load.num_blocks > 0 && html`<meter min="0" max="1" high="0.9" value=${used} aria-label="KV cache in use"></meter>`}
  </section>`;
}
