// Streams an answer and goes on with it when the connection breaks or the server's gateway dies.
//
// `resumableStream` has no dependencies and runs in browsers and in Node.js 18 or newer:
//
//     for await (const chunk of resumableStream(url, { messages })) show(chunk.choices[0]?.delta.content ?? "");
//
// A server that can resume a stream gives each event an id. The request is sent again with the id of the last event, and
// the rest of the stream follows. From a server without ids a broken stream is an error.

const TEMPORARY = new Set([409, 429, 500, 502, 503, 504]);
const PAUSE_MS = [100, 2000];

/** The server has refused the request. */
export class RefusedError extends Error {
  constructor(status, body) {
    super(body);
    this.status = status;
  }
}

/**
 * Yields the chunks of one answer as objects, over as many connections as it takes.
 *
 * `headers`: for example an API key. `giveUpMs`: how long to try after the connection broke. `signal` ends everything.
 */
export async function* resumableStream(url, body, { headers = {}, giveUpMs = 60000, signal } = {}) {
  let last = "";
  let brokenAt = null;
  let pause = PAUSE_MS[0];
  for (;;) {
    let problem;
    try {
      const response = await fetch(url, {
        method: "POST",
        signal,
        headers: {
          "Content-Type": "application/json",
          "X-Antiphon-Resumable": "1",
          ...headers,
          ...(last ? { "Last-Event-ID": last } : {}),
        },
        body: JSON.stringify({ ...body, stream: true }),
      });
      if (!response.ok) throw new RefusedError(response.status, await response.text());
      for await (const event of events(response.body)) {
        last = event.id || last;
        brokenAt = null;
        pause = PAUSE_MS[0];
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new RefusedError(200, event.data);
        yield chunk;
      }
      problem = new Error("the stream ended before its end");
    } catch (error) {
      const lasting = error instanceof RefusedError && !TEMPORARY.has(error.status);
      if (!last || lasting || signal?.aborted) throw error;
      problem = error;
    }
    brokenAt ??= Date.now();
    if (!last || Date.now() - brokenAt > giveUpMs) throw problem;
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(2 * pause, PAUSE_MS[1]);
  }
}

/** Yields whole events: one that the end of the connection has cut is left out, and comes again. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const whole = text.split("\n\n");
      text = whole.pop();
      for (const one of whole) {
        const event = { data: "", id: "" };
        for (const line of one.split("\n")) {
          const [, name, field] = /^(data|id): ?(.*)$/.exec(line) ?? [];
          if (name) event[name] += field;
        }
        if (event.data) yield event;
      }
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

if (typeof process !== "undefined" && process.argv[1]?.endsWith("resumable-stream.mjs")) {
  const base = process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1";
  const messages = [{ role: "user", content: process.argv[2] ?? "What is 12 + 7?" }];
  const key = process.env.OPENAI_API_KEY;
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  for await (const chunk of resumableStream(`${base}/chat/completions`, { messages, max_tokens: 64 }, { headers })) {
    process.stdout.write(chunk.choices[0]?.delta.content ?? "");
  }
  process.stdout.write("\n");
}
