// The browser's own database: conversations, and their messages. Every function returns a promise.

const NAME = "antiphon", VERSION = 1;
let opening = null;

const done = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

function open() {
  return (opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, VERSION);
    request.onupgradeneeded = () => {
      request.result.createObjectStore("conversations", { keyPath: "id" });
      request.result.createObjectStore("messages", { keyPath: "id" }).createIndex("conversation", "conversation");
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  }));
}

async function change(act) {
  const transaction = (await open()).transaction(["conversations", "messages"], "readwrite");
  act(transaction.objectStore("conversations"), transaction.objectStore("messages"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = transaction.onerror = () => reject(transaction.error);
  });
}

const stored = async (name) => (await open()).transaction(name).objectStore(name);

export const conversations = async () => done((await stored("conversations")).getAll());
export const messagesOf = async (id) => done((await stored("messages")).index("conversation").getAll(id));

export const write = (conversation, messages) => change((heads, bodies) => {
  heads.put(conversation);
  for (const one of messages) bodies.put(one);
});

export const erase = (ids, messages) => change((heads, bodies) => {
  for (const id of ids) heads.delete(id);
  for (const id of messages) bodies.delete(id);
});

// Calls `visit` with each message, one at a time, so that a search needs no room for all of them.
export async function eachMessage(visit) {
  const request = (await stored("messages")).openCursor();
  return new Promise((resolve, reject) => {
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      const cursor = request.result;
      if (!cursor) return resolve();
      visit(cursor.value);
      cursor.continue();
    };
  });
}
