// The last hour as the gateway measured it, from /admin/history. Kept while the page is open; later points are added to it.

import { useEffect, useState } from "../vendor/preact.js";
import { getJson } from "../api.js";
import { whileAllowed } from "./live.js";

const INTERVAL_S = 2, KEPT_S = 3600;

let kept = { time: [], series: {}, engines: {}, events: [] };

// Appends the columns of `later` after `count` points; a column that one side does not have is null there.
function appended(before, later, count, added) {
  const names = new Set([...Object.keys(before), ...Object.keys(later)]);
  const blank = (length) => Array(length).fill(null);
  return Object.fromEntries([...names].map((name) => [name, [...(before[name] || blank(count)), ...(later[name] || blank(added))]]));
}

const without = (columns, count) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values.slice(count)]));

// Returns the points of both, without those older than an hour. Pure.
export function merged(before, later) {
  const last = before.time.at(-1) ?? -Infinity;
  // The two may overlap by a point.
  const skip = later.time.findIndex((time) => time > last);
  const from = skip < 0 ? later.time.length : skip;
  const time = [...before.time, ...later.time.slice(from)];
  const added = later.time.length - from, count = before.time.length;
  const old = time.findIndex((one) => one > later.now - KEPT_S);
  const drop = old < 0 ? 0 : old;
  const join = (a, b) => without(appended(a, without(b, from), count, added), drop);
  const engines = new Set([...Object.keys(before.engines), ...Object.keys(later.engines)]);
  const known = new Set(before.events.map((one) => `${one.time}${one.kind}${one.id}`));
  return {
    now: later.now, interval_s: later.interval_s, time: time.slice(drop), series: join(before.series, later.series),
    engines: Object.fromEntries([...engines].map((name) => [name, join(before.engines[name] || {}, later.engines[name] || {})])),
    events: [...before.events, ...later.events.filter((one) => !known.has(`${one.time}${one.kind}${one.id}`))].filter((one) => one.time > later.now - KEPT_S),
  };
}

// Returns {history, error}; `history` is null until the first answer.
export function useHistory() {
  const [found, setFound] = useState({ history: kept.now ? kept : null, error: "" });
  useEffect(() => whileAllowed(INTERVAL_S, async (signal) => {
    try {
      const since = kept.time.at(-1);
      const later = await getJson(`admin/history${since === undefined ? "" : `?since=${since}`}`, signal);
      kept = merged(kept, later);
      setFound({ history: kept, error: "" });
    } catch (failure) {
      if (!signal.aborted) setFound({ history: kept.now ? kept : null, error: failure.message });
      throw failure;
    }
  }), []);
  return found;
}
