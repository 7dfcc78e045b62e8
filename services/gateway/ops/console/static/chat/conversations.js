// The list of conversations in the rail: search, rename, export, delete, import.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { download } from "../api.js";
import { stopAll } from "./answers.js";
import { flush, forgetOpened, newestFirst, remove, search, take, update, useStore } from "./store.js";
import { exported, imported } from "./transfer.js";

const SHOWN = 200;
const go = (id) => { location.hash = `#/chat/${id}`; };

export function Conversations({ chosen }) {
  const { conversations } = useStore();
  const [words, setWords] = useState("");
  const [found, setFound] = useState(null);
  const [told, setTold] = useState("");
  const field = useRef(null), file = useRef(null);
  useEffect(() => {
    if (!words.trim()) { setFound(null); return undefined; }
    let isLate = false;
    const timer = setTimeout(() => search(words).then((ids) => { if (!isLate) setFound(ids); }), 150);
    return () => { isLate = true; clearTimeout(timer); };
  }, [words, conversations.size]);
  useEffect(() => {
    const onKey = (event) => {
      if (!(event.ctrlKey || event.metaKey)) return;
      if (event.key === "k") { event.preventDefault(); field.current.focus(); }
      if (event.shiftKey && event.key.toLowerCase() === "o") { event.preventDefault(); go("new"); }
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  const shown = newestFirst().filter(({ id }) => !found || found.has(id));
  const removeThem = async (ids, question) => {
    if (!confirm(question)) return;
    for (const id of ids) stopAll(conversations.get(id));
    await remove(ids);
    if (ids.includes(chosen)) { forgetOpened(); go("new"); }
  };
  const write = async (list, name) => { await flush(); download(new Blob([await exported(list)], { type: "application/json" }), name); };
  const read = async ([given]) => {
    if (!given) return;
    try {
      const list = imported(await given.text());
      await take(list);
      setTold(`${list.length} conversation${list.length === 1 ? "" : "s"} imported.`);
    } catch (failure) { setTold(`${given.name} cannot be imported: ${failure.message}.`); }
  };
  return html`<section class="conversations" aria-label="Conversations">
    <a class="button primary" href="#/chat/new" title="Ctrl+Shift+O">New conversation</a>
    <input ref=${field} type="search" aria-label="Search the conversations" placeholder="Search (Ctrl+K)" value=${words} onInput=${(e) => setWords(e.target.value)} />
    <ul>${shown.slice(0, SHOWN).map((one) => html`<${Item} key=${one.id} one=${one} isChosen=${one.id === chosen} write=${write} removeThem=${removeThem} />`)}</ul>
    ${shown.length === 0 && html`<p class="note">${conversations.size ? "No conversation has these words." : "Conversations are kept in this browser."}</p>`}
    ${shown.length > SHOWN && html`<p class="note">and ${shown.length - SHOWN} older ones: search for them</p>`}
    ${told && html`<p class="note" role="status">${told}</p>`}
    <p class="all"><button name="import" onClick=${() => file.current.click()}>Import</button>
      <button name="export-all" disabled=${!conversations.size} onClick=${() => write(newestFirst(), "antiphon-conversations.json")}>Export all</button>
      <button name="delete-all" disabled=${!conversations.size} onClick=${() => removeThem([...conversations.keys()], `Delete all ${conversations.size} conversations from this browser?`)}>Delete all</button>
      <input ref=${file} type="file" name="import-file" accept="application/json,.json" hidden tabindex="-1" aria-label="File to import" onChange=${(e) => { read([...e.target.files]); e.target.value = ""; }} /></p>
  </section>`;
}

function Item({ one, isChosen, write, removeThem }) {
  const [isOpen, setOpen] = useState(false);
  const [name, setName] = useState(null);
  const rename = (event) => { event.preventDefault(); if (name.trim()) update(one, { title: name.trim(), isNamed: true }); setName(null); setOpen(false); };
  if (name !== null) return html`<li><form onSubmit=${rename}><input name="title" aria-label="Name of the conversation" value=${name} autofocus
    ref=${(field) => field?.focus()} onInput=${(e) => setName(e.target.value)} onKeyDown=${(e) => { if (e.key === "Escape") setName(null); }} onBlur=${rename} /></form></li>`;
  return html`<li class=${isChosen ? "chosen" : ""}>
    <a href="#/chat/${one.id}" aria-current=${isChosen ? "page" : undefined}>${one.isRunning && html`<span class="runs" title="An answer is running">●</span>`}${one.title || "Conversation"}</a>
    <button name="more" aria-label=${`Actions of ${one.title}`} aria-expanded=${isOpen ? "true" : "false"} onClick=${() => setOpen(!isOpen)}>⋯</button>
    ${isOpen && html`<span class="row-acts"><button name="rename" onClick=${() => setName(one.title)}>Rename</button>
      <button name="export" onClick=${() => write([one], `${one.title.replace(/[^\p{L}\p{N} _-]+/gu, "").trim() || "conversation"}.json`)}>Export</button>
      <button name="remove" onClick=${() => removeThem([one.id], `Delete "${one.title}"?`)}>Delete</button></span>`}
  </li>`;
}
