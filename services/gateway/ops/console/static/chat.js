// A conversation with the model: streamed, stopped, generated anew, with images, tools, and the probability of each token.

import { html, useEffect, useRef, useState } from "./preact.js";
import { getJson, streamed } from "./api.js";
import { Message, addCalls, percent, sent } from "./message.js";

const DEFAULTS = { model: "", system: "", temperature: 0.7, top_p: 1, max_tokens: 256, seed: "", probabilities: true, tools: "", tool_choice: "auto" };
const SETTINGS = "antiphon-chat";
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1], ["top_p", "Top p", 0.01, 1, 0.01], ["max_tokens", "Max tokens", 1, 100000, 1],
  ["seed", "Seed", 0, 2 ** 31, 1],
];
// The conversation stays while other views are open.
const kept = { messages: [], draft: "", images: [] };

const saved = () => {
  try { return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(SETTINGS) || "{}") }; } catch { return DEFAULTS; }
};
const IMAGE_BYTES = 10 * 2 ** 20;
const EXAMPLE = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "The weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 1);

const asDataUrl = (file) => new Promise((done, fail) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result);
  reader.onerror = () => fail(new Error(`${file.name} cannot be read.`));
  reader.readAsDataURL(file);
});

export function Chat() {
  const [messages, setMessages] = useState(kept.messages);
  const [draft, setDraft] = useState(kept.draft);
  const [images, setImages] = useState(kept.images);
  const [options, setOptions] = useState(saved());
  const [models, setModels] = useState([]);
  const [error, setError] = useState("");
  const [shown, setShown] = useState(null);
  const running = useRef(null);
  const [busy, setBusy] = useState(false);
  kept.messages = messages; kept.draft = draft; kept.images = images;

  useEffect(() => {
    getJson("v1/models").then((found) => setModels(found.data.map((one) => one.id)), (failure) => setError(failure.message));
    return () => running.current?.abort();
  }, []);
  const change = (name, value) => {
    const next = { ...options, [name]: value };
    setOptions(next);
    localStorage.setItem(SETTINGS, JSON.stringify(next));
  };

  const answer = async (conversation) => {
    const controller = (running.current = new AbortController());
    const reply = { role: "assistant", content: "", tokens: [], id: "", calls: [] };
    setError(""); setShown(null); setBusy(true); setMessages([...conversation, reply]);
    const began = performance.now();
    try {
      for await (const chunk of streamed("v1/chat/completions", body(options, conversation), controller.signal)) {
        reply.id = chunk.id;
        if (chunk.usage) reply.usage = chunk.usage;
        const choice = chunk.choices[0];
        if (!choice) continue;
        if (choice.delta.content) {
          reply.first ??= (performance.now() - began) / 1000;
          reply.content += choice.delta.content;
        }
        addCalls(reply.calls, choice.delta.tool_calls);
        if (choice.delta.tool_calls) reply.first ??= (performance.now() - began) / 1000;
        reply.tokens.push(...(choice.logprobs?.content || []));
        if (choice.finish_reason) reply.finish = choice.finish_reason;
        setMessages([...conversation, { ...reply }]);
      }
    } catch (failure) {
      // Browsers report an aborted stream with errors of different names.
      const stopped = controller.signal.aborted;
      if (!stopped) setError(failure.message);
      reply.finish = stopped ? "stopped" : "failed";
    }
    reply.seconds = (performance.now() - began) / 1000;
    setMessages([...conversation, { ...reply }]);
    setBusy(false);
  };
  const ask = () => {
    const text = draft.trim();
    if (!text || busy) return;
    setDraft(""); setImages([]);
    answer([...messages, { role: "user", content: text, images }]);
  };
  const attach = async (files) => {
    setError("");
    try {
      for (const file of files) {
        if (!file.type.startsWith("image/")) throw new Error(`${file.name} is not an image.`);
        if (file.size > IMAGE_BYTES) throw new Error(`${file.name} is larger than ${IMAGE_BYTES / 2 ** 20} MiB.`);
        const url = await asDataUrl(file);
        setImages((before) => [...before, url]);
      }
    } catch (failure) { setError(failure.message); }
  };
  const pasted = (event) => {
    const files = [...event.clipboardData.files];
    if (files.length) { event.preventDefault(); attach(files); }
  };
  const again = () => answer(messages.slice(0, messages.findLastIndex((one) => one.role !== "assistant") + 1));
  const onKey = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(); }
    if (event.key === "Escape") running.current?.abort();
  };

  return html`
    <h1>Chat</h1>
    <div class="bar">
      <label>Model<select value=${options.model} onChange=${(e) => change("model", e.target.value)}>
        <option value="">default</option>${models.map((name) => html`<option value=${name}>${name}</option>`)}
      </select></label>
      ${NUMBERS.map(([name, title, min, max, step]) => html`
        <label>${title}<input type="number" name=${name} value=${options[name]} min=${min} max=${max} step=${step}
          onInput=${(e) => change(name, e.target.value === "" ? "" : Number(e.target.value))} /></label>`)}
      <label class="wide">System message<input name="system" value=${options.system}
        onInput=${(e) => change("system", e.target.value)} /></label>
      <label class="row"><input type="checkbox" name="probabilities" checked=${options.probabilities}
        onChange=${(e) => change("probabilities", e.target.checked)} />Probabilities</label>
    </div>
    <details open=${Boolean(options.tools)}><summary>Tools</summary><div class="bar">
      <label class="wide">Functions that the model may call, as in the API's tools<textarea name="tools" rows="6" spellcheck="false" placeholder=${EXAMPLE}
        value=${options.tools} onInput=${(e) => change("tools", e.target.value)}></textarea></label>
      <label>Choice<select name="tool_choice" value=${options.tool_choice} onChange=${(e) => change("tool_choice", e.target.value)}>
        ${["auto", "required", "none"].map((one) => html`<option value=${one}>${one}</option>`)}</select></label>
      <button name="example" onClick=${() => change("tools", EXAMPLE)}>Example</button>
    </div></details>
    <div class="messages" role="log" aria-live="polite" aria-busy=${busy ? "true" : "false"}>
      ${messages.map((one, index) => html`<${Message} message=${one} show=${setShown}
        reply=${!busy && index === messages.length - 1 && ((results) => answer([...messages, ...results]))} />`)}
      ${messages.length === 0 && html`<p class="note">Ask something. Enter sends, Shift+Enter starts a line, Escape stops.</p>`}
    </div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${shown && html`<div class="probabilities" role="status">
      <strong>${JSON.stringify(shown.token)} ${percent(shown.logprob)}</strong>${" of: "}
      ${(shown.top_logprobs || []).map((one) => html`<span>${JSON.stringify(one.token)} ${percent(one.logprob)}</span>`)}
    </div>`}
    ${images.length > 0 && html`<div class="bar images">${images.map((url, index) => html`<button
      aria-label=${`Remove image ${index + 1}`} onClick=${() => setImages(images.filter((one, at) => at !== index))}><img src=${url} alt="" /> ✕</button>`)}</div>`}
    <div class="ask">
      <textarea aria-label="Message" value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${onKey} onPaste=${pasted}></textarea>
      <label class="attach">Images<input type="file" name="images" accept="image/*" multiple
        onChange=${(e) => { attach([...e.target.files]); e.target.value = ""; }} /></label>
      ${busy ? html`<button name="stop" onClick=${() => running.current?.abort()}>Stop</button>`
             : html`<button name="send" class="primary" disabled=${!draft.trim()} onClick=${ask}>Send</button>`}
      <button name="again" disabled=${busy || !messages.length} onClick=${again}>Regenerate</button>
      <button name="clear" disabled=${busy || !messages.length} onClick=${() => { setMessages([]); setError(""); setShown(null); }}>Clear</button>
    </div>`;
}

function body(options, conversation) {
  const turns = conversation.map(sent);
  const found = { messages: options.system ? [{ role: "system", content: options.system }, ...turns] : turns, stream: true,
    stream_options: { include_usage: true } };
  for (const name of ["model", "temperature", "top_p", "max_tokens", "seed"]) if (options[name] !== "") found[name] = options[name];
  if (options.tools.trim()) Object.assign(found, { tools: tools(options.tools), tool_choice: options.tool_choice });
  return options.probabilities ? { ...found, logprobs: true, top_logprobs: 5 } : found;
}

function tools(text) {
  try { return JSON.parse(text); } catch (failure) { throw new Error(`Tools: not JSON (${failure.message}).`); }
}
