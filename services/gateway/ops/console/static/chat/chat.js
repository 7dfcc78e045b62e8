// A conversation with a model: its messages, the composer, and the drawer with the settings.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { getJson } from "../api.js";
import { ask, isRunning, resume, resumeAll, stop, stopAll } from "./answers.js";
import { Composer } from "./composer.js";
import { Message } from "./message.js";
import { DEFAULTS, bodyOf, saveOptions, savedOptions } from "./request.js";
import { Settings } from "./settings.js";
import { add, choose, create, cut, lastOpened, open, start, useStore } from "./store.js";
import { pathTo, siblings, subtree } from "./tree.js";

// Nearer to the end than this, the view follows the newest text.
const NEAR_PX = 80;
start().then(resumeAll);

// id: of a conversation, "new", or empty for the one that was open last.
export function Chat({ id }) {
  const { conversations, isReady, problem } = useStore();
  const [options, setOptions] = useState(savedOptions());
  const [models, setModels] = useState([]);
  const [error, setError] = useState("");
  const [drawer, setDrawer] = useState(false);
  const wanted = id || lastOpened();
  const conversation = conversations.get(wanted);
  const path = conversation?.messages ? pathTo(conversation.messages, conversation.leaf) : [];
  const current = path.find(isRunning);
  const model = models.find((one) => one.id === options.model) || models.find(({ tasks }) => tasks.includes("generate"));

  useEffect(() => { getJson("v1/models").then((found) => setModels(found.data), (failure) => setError(failure.message)); }, []);
  useEffect(() => { if (isReady && conversation) open(wanted); }, [isReady, wanted, conversation]);
  useEffect(() => { document.title = `${conversation?.title || "New conversation"} · Antiphon`; }, [conversation?.title]);
  useEffect(() => {
    const onKey = (event) => { if ((event.ctrlKey || event.metaKey) && event.key === ",") { event.preventDefault(); setDrawer((is) => !is); } };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);
  const change = (name, value) => setOptions((before) => { const next = { ...before, [name]: value }; saveOptions(next); return next; });
  const reset = () => { const next = { ...DEFAULTS, model: options.model }; saveOptions(next); setOptions(next); };

  // Asks for an answer to the messages up to `parent`. Returns what is wrong with the settings.
  const answer = (into, parent) => {
    try { ask(into, parent, bodyOf(options, pathTo(into.messages, parent))); } catch (failure) { return failure.message; }
    return "";
  };
  const send = (fields) => {
    try { bodyOf(options, []); } catch (failure) { setDrawer(true); return failure.message; }
    const into = conversation || create();
    const message = add(into, { role: "user", ...fields });
    if (!conversation) location.hash = `#/chat/${into.id}`;
    return answer(into, message.id);
  };
  const actions = {
    again: (message) => setError(answer(conversation, message.parent)),
    resume: (message) => resume(conversation, message),
    edit: (message, text) => {
      const { role, images, files, reasoning, model: by } = message;
      const made = add(conversation, role === "user" ? { role, content: text, images, files } : { role, content: text, reasoning, model: by, status: "done" }, message.parent);
      if (role === "user") setError(answer(conversation, made.id));
    },
    choose: (message) => choose(conversation, message.id),
    cut: (message) => {
      if (!confirm("Delete this message and all that follow it?")) return;
      stopAll(conversation, subtree(conversation.messages, message.id));
      cut(conversation, message);
    },
    reply: (results) => {
      const last = results.reduce((parent, one) => add(conversation, one, parent).id, conversation.leaf);
      setError(answer(conversation, last));
    },
  };
  const editLast = path.some(({ role }) => role === "user") && (() => [...document.querySelectorAll(".turn.user [name=edit]")].at(-1)?.click());
  return html`
    <div class="chat-head">
      <h1>${conversation?.title || "New conversation"}</h1>
      <${Context} path=${path} model=${model} />
      <label class="model">Model<select name="model" value=${options.model} onChange=${(e) => change("model", e.target.value)}>
        <option value="">${model ? `${model.id} (default)` : "default"}</option>
        ${models.map((one) => html`<option value=${one.id}>${one.id}</option>`)}
      </select></label>
      <button name="settings" aria-expanded=${drawer ? "true" : "false"} onClick=${() => setDrawer(!drawer)}>Settings</button>
    </div>
    ${(error || problem) && html`<p class="error" role="alert">${error || problem}</p>`}
    <${Log} key=${wanted} path=${path} conversation=${conversation} actions=${actions} isEmpty=${isReady && path.length === 0} />
    <${Composer} id=${conversation?.id} takesImages=${!model?.input_modalities || model.input_modalities.includes("image")} send=${send}
      stop=${current && (() => stop(current))} editLast=${editLast} />
    ${drawer && html`<${Settings} options=${options} change=${change} reset=${reset} model=${model} close=${() => setDrawer(false)} />`}`;
}

// How much of the model's context the conversation took with its last answer.
function Context({ path, model }) {
  const used = path.findLast(({ usage }) => usage)?.usage;
  if (!used || !model) return null;
  const count = used.prompt_tokens + used.completion_tokens;
  return html`<span class="context" title="Tokens of this conversation, and of the model's context">
    <meter min="0" max=${model.max_model_len} high=${0.9 * model.max_model_len} value=${count} aria-label="Context in use"></meter>
    ${count.toLocaleString()} / ${model.max_model_len.toLocaleString()} tokens</span>`;
}

// The messages. The view follows the newest text while its end is in sight.
function Log({ path, conversation, actions, isEmpty }) {
  const box = useRef(null), inside = useRef(null), follows = useRef(true), top = useRef(0);
  const [isAway, setAway] = useState(false);
  const scroll = () => {
    if (!box.current) return;
    box.current.scrollTop = box.current.scrollHeight;
    top.current = box.current.scrollTop;
  };
  const toEnd = () => { follows.current = true; scroll(); setAway(false); };
  useEffect(() => {
    const observer = new ResizeObserver(() => { if (follows.current) scroll(); });
    observer.observe(inside.current);
    return () => observer.disconnect();
  }, []);
  // A new question is always shown.
  useEffect(() => { if (path.at(-1)?.role === "user" || path.at(-1)?.status === "running") toEnd(); }, [path.length, path.at(-1)?.id]);
  const onScroll = () => {
    if (!box.current) return;
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    // Text that has arrived since the last scroll makes the end far, too: only who scrolls up wants to stay.
    if (scrollHeight - scrollTop - clientHeight < NEAR_PX) follows.current = true;
    else if (scrollTop < top.current - 1) follows.current = false;
    top.current = scrollTop;
    setAway(!follows.current);
  };
  return html`<div class="log" ref=${box} onScroll=${onScroll} tabindex="0" role="region" aria-label="Messages">
    <div class="column" ref=${inside} role="log" aria-busy=${path.some(isRunning) ? "true" : "false"}>
      ${path.map((one, index) => html`<${Message} key=${one.id} message=${one} versions=${siblings(conversation.messages, one)} isLast=${index === path.length - 1} actions=${actions} />`)}
      ${isEmpty && html`<div class="welcome"><p>What can I do for you?</p><p class="note">Enter sends, Shift+Enter begins a new line, Escape stops. Help lists more keys.</p></div>`}
    </div>
    ${isAway && html`<button name="to-end" class="to-end" aria-label="To the end" onClick=${toEnd}>↓</button>`}
  </div>`;
}
