// Answers that run: independent of the views, so that they go on while another one is open, and after a reload.

import { add, changed, flush, open, state, update } from "./store.js";
import { answer, end } from "./stream.js";
import { ApiError } from "../api.js";

const running = new Map();

export const isRunning = (message) => message.status === "running";
// Other tabs may show an answer that runs here, and must not take its stream away.
const withLock = (message, run) => (navigator.locks
  ? navigator.locks.request(`antiphon-answer-${message.id}`, { ifAvailable: true }, (lock) => lock && run())
  : run());

// Asks for an answer to the message `parent`, as its child. `body`: of the request.
export function ask(conversation, parent, body) {
  const fields = { role: "assistant", reasoning: "", tokens: [], calls: [], status: "running", model: body.model || "", began: Date.now() };
  const message = add(conversation, fields, parent);
  update(conversation, { isRunning: true });
  withLock(message, () => run(conversation, message, { body }));
  return message;
}

// Stops what runs of a conversation, or only of the messages with these ids.
export function stopAll(conversation, ids = [...(conversation.messages?.keys() || [])]) {
  for (const id of ids) if (isRunning(conversation.messages.get(id))) stop(conversation.messages.get(id));
}

export function stop(message) {
  if (running.has(message.id)) running.get(message.id).abort();
  else if (message.position) end(message.position).catch(() => {});
}

// Goes on with an answer whose connection was lost for too long.
export function resume(conversation, message) {
  Object.assign(message, { status: "running", error: "", isLost: false });
  update(conversation, { isRunning: true }, [message]);
  withLock(message, () => run(conversation, message, { position: message.position }));
}

// Goes on with the answers that ran when the page was left.
export async function resumeAll() {
  for (const { id, isRunning: hasRun } of [...state.conversations.values()]) {
    if (!hasRun) continue;
    const conversation = await open(id);
    const unfinished = [...conversation.messages.values()].filter(isRunning);
    if (!unfinished.length) update(conversation, { isRunning: false });
    for (const message of unfinished) withLock(message, () => run(conversation, message, { position: message.position || "" }));
  }
}

async function run(conversation, message, { body, position = "" }) {
  const controller = new AbortController();
  running.set(message.id, controller);
  state.here.add(message.id);
  const waiting = (is) => { message.isWaiting = is; changed(message); };
  try {
    if (!body && !position) throw new Error("The page was left before the server had begun the answer.");
    for await (const next of answer({ body, position, signal: controller.signal, waiting })) {
      apply(message, next.chunk);
      // A server that keeps no streams gives no positions.
      const isFirst = !message.position && next.position;
      message.position = next.position;
      if (next.ignored) message.ignored = next.ignored;
      changed(message);
      // From now on the answer outlives the page.
      if (isFirst) flush();
    }
    message.status = "done";
  } catch (failure) {
    // Browsers report an aborted stream with errors of different names.
    const isStopped = controller.signal.aborted;
    message.status = isStopped ? "stopped" : "failed";
    message.isLost = !isStopped && !(failure instanceof ApiError) && Boolean(message.position);
    const told = failure instanceof TypeError || failure.name === "AbortError" ? "The server cannot be reached." : failure.message;
    if (!isStopped) message.error = body ? told : `The rest of the answer cannot be had: ${told}`;
    if (isStopped && message.position) end(message.position).catch(() => {});
  }
  running.delete(message.id);
  state.here.delete(message.id);
  message.isWaiting = false;
  message.seconds ??= (Date.now() - message.began) / 1000;
  const now = state.conversations.get(conversation.id);
  // Both may have been deleted meanwhile.
  if (now?.messages.has(message.id)) update(now, { isRunning: isBusy(now) }, [message]);
  changed(message);
}

const isBusy = (conversation) => [...conversation.messages.values()].some(isRunning);

// Adds one chunk of the stream to the answer.
function apply(message, chunk) {
  message.requestId = chunk.id;
  if (chunk.model) message.model = chunk.model;
  if (chunk.usage) message.usage = chunk.usage;
  const choice = chunk.choices[0];
  if (!choice) return;
  const { content, tool_calls: pieces, reasoning_content: thought = choice.delta.reasoning } = choice.delta;
  if (content || pieces || thought) message.first ??= (Date.now() - message.began) / 1000;
  if (thought) message.reasoning += thought;
  if (content) {
    if (message.reasoning) message.thought ??= (Date.now() - message.began) / 1000 - message.first;
    message.content += content;
  }
  addCalls(message.calls, pieces);
  for (const one of choice.logprobs?.content || []) message.tokens.push([one.token, one.logprob, one.top_logprobs.map(({ token, logprob }) => [token, logprob])]);
  if (choice.finish_reason) {
    message.finish = choice.finish_reason;
    message.seconds = (Date.now() - message.began) / 1000;
  }
}

function addCalls(calls, pieces) {
  for (const { index, id, function: part } of pieces || []) {
    calls[index] ??= { id: "", name: "", text: "" };
    calls[index].id ||= id || "";
    calls[index].name ||= part?.name || "";
    calls[index].text += part?.arguments || "";
  }
}
