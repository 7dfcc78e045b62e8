// The field for the next message, with files by button, paste and drop. What is being written outlives a reload.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { attachment } from "./attachments.js";

const DRAFT = "antiphon-draft";
// On a phone the focus would open its keyboard over the conversation, and its Enter begins a line.
const isTouched = () => matchMedia("(pointer: coarse)").matches;

// send({content, images, files}); stop: set while an answer runs; editLast: edits the last message of the user.
export function Composer({ id, takesImages, send, stop, editLast }) {
  const key = `${DRAFT}-${id || "new"}`;
  const [text, setText] = useState(sessionStorage.getItem(key) || "");
  const [attached, setAttached] = useState([]);
  const [error, setError] = useState("");
  const [isOver, setOver] = useState(false);
  const field = useRef(null), files = useRef(null);
  useEffect(() => {
    setText(sessionStorage.getItem(key) || ""); setAttached([]); setError("");
    if (!isTouched()) field.current.focus();
  }, [key]);
  useEffect(() => {
    field.current.style.height = "auto";
    field.current.style.height = `${field.current.scrollHeight + 2}px`;
  }, [text]);
  const write = (value) => { setText(value); sessionStorage.setItem(key, value); };
  const attach = async (given) => {
    setError("");
    for (const file of given) {
      try {
        const one = await attachment(file, takesImages);
        setAttached((before) => [...before, one]);
      } catch (failure) { setError(failure.message); }
    }
  };
  const canSend = !stop && (text.trim() || attached.length > 0);
  const submit = () => {
    if (!canSend) return;
    const problem = send({ content: text.trim(), images: attached.flatMap(({ image }) => image || []), files: attached.flatMap(({ file }) => file || []) });
    if (problem) { setError(problem); return; }
    write(""); setAttached([]); setError("");
  };
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouched()) { event.preventDefault(); submit(); }
    if (event.key === "Escape" && stop) stop();
    if (event.key === "ArrowUp" && !text && editLast) { event.preventDefault(); editLast(); }
  };
  const pasted = (event) => {
    const given = [...event.clipboardData.files];
    if (given.length) { event.preventDefault(); attach(given); }
  };
  // Files may be dropped anywhere on the page.
  useEffect(() => {
    const over = (event) => { if (event.dataTransfer?.types.includes("Files")) { event.preventDefault(); setOver(true); } };
    const leave = (event) => { if (!event.relatedTarget) setOver(false); };
    const drop = (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      setOver(false);
      attach([...event.dataTransfer.files]);
    };
    const all = { dragover: over, dragleave: leave, drop };
    for (const [name, act] of Object.entries(all)) document.addEventListener(name, act);
    return () => { for (const [name, act] of Object.entries(all)) document.removeEventListener(name, act); };
  }, [takesImages]);
  return html`<div class=${`composer ${isOver ? "over" : ""}`}>
    ${error && html`<p class="error" role="alert">${error} <button name="dismiss" onClick=${() => setError("")}>Dismiss</button></p>`}
    ${attached.length > 0 && html`<ul class="attached">${attached.map((one, index) => html`<li>
      ${one.image ? html`<img src=${one.image} alt=${`Image ${index + 1}`} />` : html`<span>${one.file.name}</span>`}
      <button aria-label=${`Remove ${one.file?.name || `image ${index + 1}`}`} onClick=${() => setAttached(attached.filter((_, at) => at !== index))}>✕</button></li>`)}</ul>`}
    <div class="ask">
      <button name="attach" aria-label="Attach files" title="Attach images, text or PDF files" onClick=${() => files.current.click()}>+</button>
      <input ref=${files} type="file" name="files" multiple hidden tabindex="-1" aria-label="Files" onChange=${(e) => { attach([...e.target.files]); e.target.value = ""; }} />
      <textarea ref=${field} aria-label="Message" rows="1" placeholder="Ask something" value=${text} onInput=${(e) => write(e.target.value)} onKeyDown=${onKey} onPaste=${pasted}></textarea>
      ${stop ? html`<button name="stop-all" class="primary" onClick=${stop}>Stop</button>` : html`<button name="send" class="primary" disabled=${!canSend} onClick=${submit}>Send</button>`}
    </div>
    ${isOver && html`<p class="note">Drop images, text or PDF files here.</p>`}
  </div>`;
}
