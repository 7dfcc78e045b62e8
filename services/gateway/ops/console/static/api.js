// Requests to the gateway. The key stays in this tab's session; a 401 asks for one through `onKeyNeeded`.

const KEY = "antiphon-key";
let askForKey = null;

export const onKeyNeeded = (ask) => { askForKey = ask; };
export const storedKey = () => sessionStorage.getItem(KEY) || "";
export const storeKey = (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY));

export class ApiError extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function send(path, options = {}) {
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

// Saves an answer as a file of the browser's user.
export async function save(path, name) {
  const address = URL.createObjectURL(await (await send(path)).blob());
  const link = Object.assign(document.createElement("a"), { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

// Yields the objects of a streamed answer.
export async function* streamed(path, body, signal) {
  const headers = { "content-type": "application/json" };
  const reply = await send(path, { method: "POST", body: JSON.stringify(body), headers, signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));
      if (!line || line === "data: [DONE]") continue;
      const data = JSON.parse(line.slice(6));
      if (data.error) throw new ApiError(500, data.error.message);
      yield data;
    }
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
