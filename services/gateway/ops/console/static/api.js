// Requests to the gateway. The key stays in this tab's session; a 401 asks for one through `onKeyNeeded`.

const KEY = "antiphon-key";
let askForKey = null;

export const onKeyNeeded = (ask) => { askForKey = ask; };
export const storedKey = () => sessionStorage.getItem(KEY) || "";
export const storeKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export async function send(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (storedKey()) headers.authorization = `Bearer ${storedKey()}`;
  const reply = await fetch(path, { ...options, headers });
  if (reply.ok) return reply;
  const text = await reply.text();
  let message = text || reply.statusText;
  try { message = JSON.parse(text).error.message; } catch { /* not an error object: the text itself is shown */ }
  if (reply.status === 401 && askForKey) askForKey(message);
  throw new ApiError(reply.status, message);
}

export const getJson = async (path, signal) => (await send(path, { signal })).json();
export const getText = async (path, signal) => (await send(path, { signal })).text();

export const postJson = async (path, body) => (await send(path, { method: "POST", body: JSON.stringify(body),
  headers: { "content-type": "application/json" } })).json();

// Gives the browser's user a file.
export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  Object.assign(document.createElement("a"), { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

export const save = async (path, name) => download(await (await send(path)).blob(), name);

// Yields the events of a stream as {data, id}. One that the end of the connection has cut is left out.
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const whole = (rest + value).split("\n\n");
      rest = whole.pop();
      for (const one of whole) {
        const event = { data: "", id: "" };
        for (const line of one.split("\n")) {
          if (line.startsWith("data: ")) event.data += line.slice(6);
          else if (line.startsWith("id: ")) event.id = line.slice(4);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Yields the objects of a streamed answer.
export async function* streamed(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const reply = await send(path, { method: "POST", body: JSON.stringify(body), headers, signal });
  for await (const { data } of events(reply.body)) {
    if (data === "[DONE]") continue;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
}

// Calls `look` at once and then every `seconds`, until the returned function is called. Skips while the page is hidden.
export function every(seconds, look) {
  const controller = new AbortController();
  let timer = 0;
  const turn = async () => {
    if (!document.hidden) await look(controller.signal);
    if (!controller.signal.aborted) timer = setTimeout(turn, 1000 * seconds);
  };
  turn();
  return () => { controller.abort(); clearTimeout(timer); };
}

export const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(1e6 * value).toFixed(0)} µs`;
  return value < 1 ? `${(1000 * value).toFixed(value < 0.1 ? 1 : 0)} ms` : `${value.toFixed(2)} s`;
};
