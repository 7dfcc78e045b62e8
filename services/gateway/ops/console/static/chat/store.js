// The conversations in memory, kept in the browser's database. Views subscribe; answers go on while no view is there.
//
// A conversation: {id, title, isNamed, created, updated, leaf, isRunning}, with `messages` (a Map by id) when it is open.
// A message: {id, conversation, number, parent, role, content, …}; an answer has `status`: running, done, stopped or failed.

import { useEffect, useState } from "../vendor/preact.js";
import * as database from "./database.js";
import { newId, newestLeaf, subtree, titleOf } from "./tree.js";

const SAVE_MS = 500, DRAW_MS = 100;
const OPENED = "antiphon-open-conversation";
// here: the ids of the answers that run in this tab.
export const state = { conversations: new Map(), here: new Set(), isReady: false, problem: "" };
const views = new Set();
const watchers = new Map();
const dirty = new Set(), undrawn = new Set();
let drawing = 0, saving = 0, saveMs = SAVE_MS;
// Tells other tabs what has changed.
const channel = typeof BroadcastChannel === "undefined" ? null : new BroadcastChannel("antiphon-conversations");

// Renders the calling component again when the conversations change.
export function useStore() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const view = () => redraw((count) => count + 1);
    views.add(view);
    return () => views.delete(view);
  }, []);
  return state;
}

// Renders the calling component again when this message changes: at most every DRAW_MS.
export function useMessage(message) {
  const [, redraw] = useState(0);
  useEffect(() => {
    const watcher = () => redraw((count) => count + 1);
    if (!watchers.has(message.id)) watchers.set(message.id, new Set());
    watchers.get(message.id).add(watcher);
    return () => {
      watchers.get(message.id)?.delete(watcher);
      if (!watchers.get(message.id)?.size) watchers.delete(message.id);
    };
  }, [message.id]);
}

const notify = () => { for (const view of views) view(); };

// Draws a changed message and saves it, both soon: each frame costs more than the tokens in it.
export function changed(message) {
  dirty.add(message);
  undrawn.add(message);
  drawing ||= setTimeout(() => {
    drawing = 0;
    for (const one of undrawn) for (const watcher of watchers.get(one.id) || []) watcher();
    undrawn.clear();
  }, DRAW_MS);
  saving ||= setTimeout(flush, saveMs);
}

// Writes what has changed. The time between two writes grows with their cost, so that long answers stay cheap.
export async function flush() {
  clearTimeout(saving);
  saving = 0;
  const began = performance.now();
  const messages = [...dirty];
  dirty.clear();
  for (const one of messages) {
    const conversation = state.conversations.get(one.conversation);
    if (conversation?.messages.has(one.id)) await save(conversation, [one]);
  }
  saveMs = Math.max(SAVE_MS, 20 * (performance.now() - began));
}

async function save(conversation, messages = []) {
  const { messages: all, ...head } = conversation;
  try {
    await database.write(head, messages);
    channel?.postMessage({ id: conversation.id });
  } catch (failure) {
    state.problem = `This browser does not keep the conversations: ${failure.message || failure.name}.`;
    notify();
  }
}

export async function start() {
  try {
    for (const one of await database.conversations()) state.conversations.set(one.id, one);
  } catch (failure) {
    state.problem = `This browser keeps no conversations: ${failure.message || failure.name}.`;
  }
  state.isReady = true;
  channel?.addEventListener("message", ({ data }) => refresh(data.id));
  addEventListener("pagehide", () => { flush(); });
  document.addEventListener("visibilitychange", () => { if (document.hidden) flush(); });
  notify();
}

// Another tab has changed a conversation.
async function refresh(id) {
  const now = new Map((await database.conversations()).map((one) => [one.id, one]));
  const old = state.conversations.get(id);
  if (!now.has(id)) state.conversations.delete(id);
  else {
    const messages = old?.messages && new Map((await database.messagesOf(id)).map((one) => [one.id, one]));
    // An answer that runs in this tab is newer here.
    for (const one of old?.messages?.values() || []) if (state.here.has(one.id)) messages.set(one.id, one);
    state.conversations.set(id, { ...now.get(id), ...(messages ? { messages } : {}) });
  }
  notify();
}

export const newestFirst = () => [...state.conversations.values()].sort((a, b) => b.updated - a.updated);

// Returns a conversation with its messages; undefined if there is none.
export async function open(id) {
  const found = state.conversations.get(id);
  if (found && !found.messages) {
    const messages = await database.messagesOf(id).catch(() => []);
    found.messages ??= new Map(messages.map((one) => [one.id, one]));
    notify();
  }
  if (found) sessionStorage.setItem(OPENED, id);
  return found;
}

export const lastOpened = () => sessionStorage.getItem(OPENED) || "";
export const forgetOpened = () => sessionStorage.removeItem(OPENED);

export function create() {
  const now = Date.now();
  const made = { id: newId(), title: "", isNamed: false, created: now, updated: now, leaf: "", isRunning: false, messages: new Map() };
  state.conversations.set(made.id, made);
  return made;
}

// Adds a message behind `parent` (by default the last one) and makes it the last one of its conversation.
export function add(conversation, fields, parent = conversation.leaf) {
  const number = 1 + Math.max(0, ...[...conversation.messages.values()].map((one) => one.number));
  const message = { id: newId(), conversation: conversation.id, number, parent, content: "", ...fields };
  conversation.messages.set(message.id, message);
  Object.assign(conversation, { leaf: message.id, updated: Date.now() });
  if (!conversation.title && message.role === "user") conversation.title = titleOf(message.content || message.files?.[0]?.name || "Image");
  save(conversation, [message]);
  notify();
  return message;
}

export function update(conversation, fields, messages = []) {
  Object.assign(conversation, fields);
  save(conversation, messages);
  notify();
}

export const choose = (conversation, id) => update(conversation, { leaf: newestLeaf(conversation.messages, id) });

// Removes a message with all that follow it; the conversation goes on from the message before.
export async function cut(conversation, message) {
  const gone = subtree(conversation.messages, message.id);
  for (const id of gone) conversation.messages.delete(id);
  const leaf = message.parent ? newestLeaf(conversation.messages, message.parent) : [...conversation.messages.values()].find((one) => !one.parent)?.id || "";
  conversation.leaf = leaf && newestLeaf(conversation.messages, leaf);
  await database.erase([], gone).catch(() => {});
  await save(conversation);
  notify();
}

export async function remove(ids) {
  for (const id of ids) {
    const found = await database.messagesOf(id).catch(() => []);
    state.conversations.delete(id);
    await database.erase([id], found.map((one) => one.id)).catch(() => {});
    channel?.postMessage({ id });
  }
  notify();
}

// The ids of conversations whose title or messages have all words.
export async function search(text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = new Map([...state.conversations.values()].map((one) => [one.id, one.title.toLowerCase()]));
  await database.eachMessage((one) => {
    if (found.has(one.conversation)) found.set(one.conversation, `${found.get(one.conversation)}\n${(one.content || "").toLowerCase()}`);
  }).catch(() => {});
  return new Set([...found].filter(([, whole]) => words.every((word) => whole.includes(word))).map(([id]) => id));
}

// Puts whole conversations into the database, each with new ids where its own is taken.
export async function take(conversations) {
  for (const { messages, ...head } of conversations) {
    const isTaken = state.conversations.has(head.id);
    const ids = new Map(messages.map((one) => [one.id, isTaken ? newId() : one.id]));
    const id = isTaken ? newId() : head.id;
    const moved = messages.map((one) => ({ ...one, conversation: id, id: ids.get(one.id), parent: ids.get(one.parent) || "" }));
    const made = { ...head, id, leaf: ids.get(head.leaf) || "", isRunning: false, messages: new Map(moved.map((one) => [one.id, one])) };
    state.conversations.set(id, made);
    await save(made, moved);
  }
  notify();
}
