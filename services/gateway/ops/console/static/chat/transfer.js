// Conversations as files: written, and read with every field checked, because the file may come from anywhere.

import * as database from "./database.js";
import { newId, titleOf } from "./tree.js";

const FORMAT = "antiphon-conversations";
const ROLES = new Set(["user", "assistant", "tool"]);

export async function exported(conversations) {
  const found = [];
  for (const { messages, ...head } of conversations) found.push({ ...head, messages: await database.messagesOf(head.id) });
  return JSON.stringify({ format: FORMAT, version: 1, conversations: found }, null, 1);
}

// Returns the conversations of a file: of `exported`, or one plain list of messages in the form of the API.
export function imported(text) {
  const data = JSON.parse(text);
  if (Array.isArray(data)) return [plain(data)];
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) throw new Error(`no file of this page: "format" is not "${FORMAT}"`);
  return data.conversations.map(conversation);
}

const string = (value) => (typeof value === "string" ? value : "");
const number = (value) => (Number.isFinite(value) ? value : undefined);
const list = (value) => (Array.isArray(value) ? value : []);

function conversation(one) {
  const messages = list(one.messages).map(message);
  const ids = new Set(messages.map(({ id }) => id));
  if (ids.size !== messages.length || messages.some(({ parent }) => parent && !ids.has(parent))) throw new Error(`the messages of "${string(one.title)}" do not belong together`);
  const now = Date.now();
  return { id: string(one.id) || newId(), title: string(one.title) || "Conversation", isNamed: one.isNamed === true, created: number(one.created) ?? now,
    updated: number(one.updated) ?? now, leaf: ids.has(one.leaf) ? one.leaf : messages.at(-1)?.id || "", isRunning: false, messages };
}

function message(one, index) {
  if (!ROLES.has(one.role)) throw new Error(`a message has the role "${string(one.role)}"`);
  return {
    id: string(one.id) || newId(), number: number(one.number) ?? index + 1, parent: string(one.parent), role: one.role, content: string(one.content),
    reasoning: string(one.reasoning), images: list(one.images).filter((url) => string(url).startsWith("data:image/")),
    files: list(one.files).map(({ name, text }) => ({ name: string(name), text: string(text) })),
    calls: list(one.calls).map(({ id, name, text }) => ({ id: string(id), name: string(name), text: string(text) })),
    callId: string(one.callId), name: string(one.name), model: string(one.model), finish: string(one.finish), error: string(one.error),
    status: one.role === "assistant" ? (one.status === "failed" || one.status === "stopped" ? one.status : "done") : undefined,
    tokens: list(one.tokens).filter((token) => Array.isArray(token) && typeof token[0] === "string" && Number.isFinite(token[1]) && Array.isArray(token[2])),
    usage: number(one.usage?.completion_tokens) === undefined ? undefined : one.usage, first: number(one.first), seconds: number(one.seconds), requestId: string(one.requestId),
  };
}

function plain(turns) {
  let parent = "";
  const messages = turns.filter(({ role }) => role !== "system").map((turn, index) => {
    const made = message({ ...turn, parent }, index);
    parent = made.id;
    return made;
  });
  const now = Date.now();
  return { id: newId(), title: titleOf(messages[0]?.content || ""), isNamed: false, created: now, updated: now, leaf: parent, isRunning: false, messages };
}
