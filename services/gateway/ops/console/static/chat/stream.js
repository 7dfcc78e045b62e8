// A streamed answer over as many connections as it takes: each event has a position, from which any gateway goes on.

import { ApiError, events, send } from "../api.js";

// 401: the person at the page is asked for a key meanwhile.
const TEMPORARY = new Set([401, 409, 429, 500, 502, 503, 504]);
const PAUSE_MS = [150, 2000], GIVE_UP_MS = 60_000, ANSWER_MS = 15_000;

const pause = (ms, signal) => new Promise((resolve, reject) => {
  const timer = setTimeout(resolve, ms);
  signal.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
});

// Yields {chunk, position, ignored} of a new answer, or from `position` on of one that was begun before.
// `waiting` is called with true when the connection is lost, and with false when the answer goes on. `ignored`: names of
// parameters that have no effect here.
export async function* answer({ body, position = "", signal, waiting }) {
  let brokenAt = 0, wait = PAUSE_MS[0];
  for (;;) {
    let problem;
    try {
      const reply = position ? await resumed(position, signal) : await begun(body, signal);
      const ignored = reply.headers.get("x-antiphon-ignored") || "";
      for await (const { data, id } of events(reply.body)) {
        if (brokenAt) { waiting(false); brokenAt = 0; wait = PAUSE_MS[0]; }
        position = id || position;
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(400, chunk.error.message);
        yield { chunk, position, ignored };
      }
      problem = new Error("The connection ended before the answer did.");
    } catch (failure) {
      const isFinal = failure instanceof ApiError && !TEMPORARY.has(failure.status);
      if (signal.aborted || isFinal || !position) throw failure;
      problem = failure;
    }
    if (!position) throw problem;
    if (!brokenAt) { brokenAt = Date.now(); waiting(true); }
    if (Date.now() - brokenAt > GIVE_UP_MS) throw problem;
    await pause(wait, signal);
    wait = Math.min(2 * wait, PAUSE_MS[1]);
  }
}

const begun = (body, signal) => send("v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal,
  headers: { "content-type": "application/json", "x-antiphon-resumable": "1" } });

const split = (position) => [position.slice(0, position.indexOf(":")), position.slice(position.indexOf(":") + 1)];

// A server that takes the connection and does not answer is tried again, too.
async function resumed(position, signal) {
  const [id, from] = split(position);
  const attempt = new AbortController();
  const stop = () => attempt.abort();
  const timer = setTimeout(stop, ANSWER_MS);
  signal.addEventListener("abort", stop, { once: true });
  try {
    return await send(`v1/streams/${encodeURIComponent(id)}?from=${encodeURIComponent(from)}`, { signal: attempt.signal });
  } finally { clearTimeout(timer); }
}

// Ends an answer on the server, which would go on for a while without its client.
export const end = (position) => send(`v1/streams/${encodeURIComponent(split(position)[0])}`, { method: "DELETE" });
