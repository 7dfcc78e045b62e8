// A conversation is a tree of messages: an edited or regenerated message is a sibling of the former one. Pure.

export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((one) => one.toString(16).padStart(2, "0")).join("");

// The messages from the first one to `leaf`.
export function pathTo(messages, leaf) {
  const path = [];
  for (let one = messages.get(leaf); one; one = messages.get(one.parent)) path.unshift(one);
  return path;
}

// All versions of a message, the oldest first.
export const siblings = (messages, { parent }) => children(messages, parent);

const children = (messages, parent) => [...messages.values()].filter((one) => one.parent === parent).sort((a, b) => a.number - b.number);

// The end of the newest branch that goes through a message.
export function newestLeaf(messages, id) {
  for (let next = id; ; id = next) {
    next = children(messages, id).at(-1)?.id;
    if (!next) return id;
  }
}

// A message and all that follow it.
export const subtree = (messages, id) => [id, ...children(messages, id).flatMap((one) => subtree(messages, one.id))];

export const titleOf = (text) => {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length > 60 ? `${line.slice(0, 59)}…` : line || "Conversation";
};
