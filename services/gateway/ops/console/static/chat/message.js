// One message: what it says, the facts of an answer, and what can be done with it.

import { html, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { seconds } from "../api.js";
import { isRunning, stop } from "./answers.js";
import { Markdown, copy } from "./markdown.js";
import { parts } from "./request.js";
import { useMessage } from "./store.js";
import { Tokens } from "./tokens.js";

// actions: {again, resume, edit, choose, cut, reply}; versions: this message and its siblings.
export function Message({ message, versions, isLast, actions }) {
  useMessage(message);
  const [editing, setEditing] = useState(false);
  const [tokens, setTokens] = useState(false);
  const { role } = message;
  if (editing) return html`<${Editor} message=${message} done=${(text) => { setEditing(false); if (text !== null) actions.edit(message, text); }} />`;
  return html`<article class="turn ${role}" aria-label=${role === "user" ? "You" : role === "tool" ? `Result of ${message.name}` : "Answer"} aria-busy=${isRunning(message) ? "true" : "false"}>
    ${role === "assistant" ? html`<${Answer} message=${message} tokens=${tokens} reply=${isLast && actions.reply} again=${() => actions.again(message)} resume=${() => actions.resume(message)} />` : html`<${Asked} message=${message} />`}
    <div class="tools">
      ${versions.length > 1 && html`<${Versions} message=${message} versions=${versions} choose=${actions.choose} />`}
      ${role === "assistant" && html`<${Facts} message=${message} />`}
      <span class="acts">
        <${Copy} text=${() => (role === "assistant" ? parts(message).content : message.content)} />
        ${role !== "tool" && !isRunning(message) && html`<button name="edit" onClick=${() => setEditing(true)}>Edit</button>`}
        ${role === "assistant" && !isRunning(message) && html`<button name="again" onClick=${() => actions.again(message)}>Regenerate</button>`}
        ${message.tokens?.length > 0 && html`<button name="tokens" aria-pressed=${tokens ? "true" : "false"} onClick=${() => setTokens(!tokens)}>Tokens</button>`}
        ${!isRunning(message) && html`<button name="delete" onClick=${() => actions.cut(message)}>Delete</button>`}
      </span>
    </div>
  </article>`;
}

function Asked({ message: { role, content, images, files, name } }) {
  return html`<div class="bubble">
    ${role === "tool" && html`<div class="note">Result of ${name}</div>`}
    ${images?.map((url, index) => html`<img src=${url} alt=${`Image ${index + 1}`} />`)}
    ${files?.map((one) => html`<details class="file"><summary>${one.name}, ${one.text.length.toLocaleString()} characters</summary><pre tabindex="0">${one.text}</pre></details>`)}
    ${content}</div>`;
}

function Answer({ message, tokens, reply, again, resume }) {
  const { reasoning, content } = parts(message);
  const runs = isRunning(message);
  return html`
    ${reasoning && html`<${Thinking} message=${message} text=${reasoning} isOver=${!runs || content !== ""} />`}
    ${tokens ? html`<${Tokens} tokens=${message.tokens} />` : content && html`<${Markdown} text=${content} isDone=${!runs} />`}
    ${message.calls?.map((one) => html`<div class="call"><strong>${one.name}</strong> <code>${one.text}</code></div>`)}
    ${!runs && reply && message.calls?.length > 0 && html`<${Results} calls=${message.calls} reply=${reply} />`}
    ${runs && html`<p class="note" role="status">${message.isWaiting ? "The connection is lost. Trying again…" : content || reasoning ? "" : html`<span class="dots">Waiting for the first token</span>`}</p>`}
    ${message.status === "failed" && html`<div class="error" role="alert"><span>${message.error}</span> ${message.isLost && html`<button name="resume" onClick=${resume}>Go on</button>`}
      <button name="retry" onClick=${again}>Retry</button></div>`}`;
}

function Thinking({ message, text, isOver }) {
  const [open, setOpen] = useState(null);
  const took = message.thought ?? (isOver ? undefined : (Date.now() - message.began) / 1000 - (message.first || 0));
  return html`<details class="thinking" open=${open ?? !isOver} onToggle=${(event) => { if (event.currentTarget.open !== (open ?? !isOver)) setOpen(event.currentTarget.open); }}>
    <summary>${isOver ? "Thought" : "Thinking"}${took > 0 ? ` for ${seconds(took)}` : ""}</summary>
    <${Markdown} text=${text} isDone=${isOver} /></details>`;
}

function Facts({ message }) {
  const { usage, first, seconds: whole, finish, status, requestId, model } = message;
  const rate = usage && whole - first > 0.001 ? (usage.completion_tokens - 1) / (whole - first) : 0;
  const why = { running: "", failed: "failed", stopped: "stopped" }[status] ?? { stop: "", length: "cut: no more tokens were allowed", tool_calls: "" }[finish] ?? finish;
  const told = [why, usage && `${usage.completion_tokens} tokens`, rate > 0 && `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`, first !== undefined && `first token ${seconds(first)}`,
    whole !== undefined && `in ${seconds(whole)}`, model, message.ignored && `without effect here: ${message.ignored}`].filter(Boolean);
  if (status === "running") return html`<span class="facts"><button name="stop" onClick=${() => stop(message)}>Stop</button></span>`;
  return html`<span class="facts"><span class=${finish === "length" ? "cut" : ""}>${told.join(" · ")}</span>
    ${requestId && html`${" · "}<a href="#/requests/${encodeURIComponent(requestId)}">timeline</a>`}</span>`;
}

function Versions({ message, versions, choose }) {
  const at = versions.indexOf(message);
  return html`<span class="versions"><button aria-label="Former version" disabled=${at === 0} onClick=${() => choose(versions[at - 1])}>‹</button>
    ${at + 1} / ${versions.length}<button aria-label="Next version" disabled=${at === versions.length - 1} onClick=${() => choose(versions[at + 1])}>›</button></span>`;
}

function Copy({ text }) {
  const [told, setTold] = useState("Copy");
  const act = () => copy(text()).then(() => setTold("Copied"), () => setTold("Not copied")).then(() => setTimeout(() => setTold("Copy"), 1500));
  return html`<button name="copy" onClick=${act}>${told}</button>`;
}

function Editor({ message, done }) {
  const [text, setText] = useState(message.content);
  const field = useRef(null);
  useLayoutEffect(() => { field.current.focus(); }, []);
  const onKey = (event) => {
    if (event.key === "Escape") { event.stopPropagation(); done(null); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && message.role === "user") { event.preventDefault(); done(text); }
  };
  return html`<form class="turn editor" onSubmit=${(event) => { event.preventDefault(); done(text); }}>
    <textarea ref=${field} name="edited" aria-label="Message" rows=${Math.min(20, 2 + text.split("\n").length)} value=${text} onInput=${(event) => setText(event.target.value)} onKeyDown=${onKey}></textarea>
    <p class="bar"><button class="primary" name="save" type="submit">${message.role === "user" ? "Send" : "Save"}</button><button type="button" onClick=${() => done(null)}>Cancel</button>
      <span class="note">${message.role === "user" ? "The former version stays as a branch." : "Saved as a branch; the model takes it for its own words."}</span></p></form>`;
}

// Asks for the result of each call. The person at the page stands in for the program that would run the tools.
function Results({ calls, reply }) {
  const [results, setResults] = useState(calls.map(() => ""));
  const submit = (event) => {
    event.preventDefault();
    reply(calls.map((one, index) => ({ role: "tool", callId: one.id, name: one.name, content: results[index] })));
  };
  return html`<form class="bar" onSubmit=${submit}>
    ${calls.map((one, index) => html`<label class="wide">Result of ${one.name}<input name="result" value=${results[index]}
      onInput=${(e) => setResults(results.map((old, at) => (at === index ? e.target.value : old)))} /></label>`)}
    <button name="results" type="submit">Send results</button></form>`;
}
