// The answers of /admin/topology, once a second, and the rates between them. Views that are left find them again.

import { html, useEffect, useState } from "../vendor/preact.js";
import { ApiError, every, getJson } from "../api.js";
import { stateOf } from "./state.js";

const INTERVAL_S = 1;
// Rates are means over this time: heartbeats and answers do not come at the same moments.
const MEAN_S = 3;
// Counters of each service whose rates are shown, by the rate's name.
const COUNTED = {
  gateway: { requests: "accepted_requests" }, tokenizer: { requests: "num_requests" },
  vision: { requests: "num_requests" }, engine: { tokens: "generation_tokens", prompt: "prompt_tokens" }, detokenizer: { events: "text_events" },
};

let answers = [];

// Rates of each member by its instance id, from the oldest answer of the window that has the member to the newest one.
export function ratesOf(window) {
  const now = window.at(-1);
  const found = new Map();
  for (const one of now?.topology.members || []) {
    const first = window.find(({ topology }) => topology.members.some((other) => other.instance_id === one.instance_id));
    const before = first.topology.members.find((other) => other.instance_id === one.instance_id);
    const elapsed = (now.at - first.at) / 1000;
    const rate = (value) => (elapsed > 0 ? Math.max(0, value(one) - value(before)) / elapsed : null);
    const rates = { messages: rate((each) => each.messages_received + each.messages_sent) };
    for (const [name, counter] of Object.entries(COUNTED[one.service] || {})) rates[name] = rate((each) => each.load[counter] || 0);
    // A share of all cores that the process may use.
    if (one.resources && before.resources) rates.cpu = elapsed > 0 ? rate((each) => each.resources.cpu_s) / (one.resources.num_cores || 1) : null;
    found.set(one.instance_id, rates);
  }
  return found;
}

export const sumOf = (members, rates, name) => members.reduce((sum, one) => sum + (rates.get(one.instance_id)?.[name] || 0), 0);

function current() {
  const last = answers.at(-1);
  if (!last) return { now: null, rates: new Map() };
  const rates = ratesOf(answers);
  return { now: last.topology, rates, state: stateOf(last.topology, sumOf(last.topology.members, rates, "tokens")) };
}

// Returns {now, rates, state, error}; `now` is null until the first answer.
export function useLive() {
  const [found, setFound] = useState({ ...current(), error: null });
  useEffect(() => whileAllowed(INTERVAL_S, async (signal) => {
    try {
      const topology = await getJson("admin/topology", signal);
      const at = performance.now();
      const kept = answers.filter((one) => at - one.at < 1000 * MEAN_S);
      answers = [...(kept.length ? kept : answers.slice(-1)), { at, topology }];
      setFound({ ...current(), error: null });
    } catch (failure) {
      if (!signal.aborted) setFound({ ...current(), error: failure });
      throw failure;
    }
  }), []);
  return found;
}

// `every`, until the server refuses the key: asking again would change nothing. `look` has shown what it throws.
export function whileAllowed(seconds, look) {
  const stop = every(seconds, (signal) => look(signal).catch((failure) => { if (isRefused(failure)) stop(); }));
  return stop;
}

export const isRefused = (failure) => failure instanceof ApiError && [401, 403].includes(failure.status);

// What went wrong with the newest answer, for users.
export function problem(error) {
  if (error instanceof ApiError) return error.message;
  return "The server does not answer. What is shown is older; this page asks again every second.";
}

// The sentence about the system. A screen reader is told a new one only when more changes than its numbers.
export function StateLine({ live: { now, state, error }, large = false }) {
  if (!now && !error) return html`<p class="system">Reading the state of the system…</p>`;
  const tone = error ? "bad" : state.tone;
  const text = error ? problem(error) : state.text;
  return html`<p class="system ${tone} ${large ? "large" : ""}"><span class="lamp" aria-hidden="true"></span><span>${text}</span></p>
    <span class="unseen" role="status">${tone === "good" ? "" : text.replace(/ \d+ (s|min) ago/g, "").replace(/[\d.,]+ (requests?|sequences?|tokens\/s).*/, "")}</span>`;
}

// The same, for views about something else: it links to the overview.
export function StateLink() {
  const live = useLive();
  // Most keys may not look at the system; their views have no sentence.
  if (isRefused(live.error)) return null;
  return html`<a class="statelink" href="#/overview"><${StateLine} live=${live} /></a>`;
}
