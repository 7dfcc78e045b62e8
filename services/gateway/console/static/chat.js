// A conversation with the model: streamed, stopped, generated anew, with the probability of each token.

import { html, useEffect, useRef, useState } from "./preact.js";
import { getJson, seconds, streamed } from "./api.js";

const DEFAULTS = { model: "", system: "", temperature: 0.7, top_p: 1, max_tokens: 256, seed: "", probabilities: true };
const SETTINGS = "antiphon-chat";
const NUMBERS = [
  ["temperature", "Temperature", 0, 2, 0.1], ["top_p", "Top p", 0.01, 1, 0.01], ["max_tokens", "Max tokens", 1, 100000, 1],
  ["seed", "Seed", 0, 2 ** 31, 1],
];
// The conversation stays while other views are open.
const kept = { messages: [], draft: "" };

const saved = () => {
  try { return { ...DEFAULTS, ...JSON.parse(localStorage.getItem(SETTINGS) || "{}") }; } catch { return DEFAULTS; }
};
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

export function Chat() {
  const [messages, setMessages] = useState(kept.messages);
  const [draft, setDraft] = useState(kept.draft);
  const [options, setOptions] = useState(saved());
  const [models, setModels] = useState([]);
  const [error, setError] = useState("");
  const [shown, setShown] = useState(null);
  const running = useRef(null);
  const [busy, setBusy] = useState(false);
  kept.messages = messages; kept.draft = draft;

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
    const reply = { role: "assistant", content: "", tokens: [], id: "" };
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
        reply.tokens.push(...(choice.logprobs?.content || []));
        if (choice.finish_reason) reply.finish = choice.finish_reason;
        setMessages([...conversation, { ...reply }]);
      }
    } catch (failure) {
      if (failure.name !== "AbortError") setError(failure.message);
      reply.finish = failure.name === "AbortError" ? "stopped" : "failed";
    }
    reply.seconds = (performance.now() - began) / 1000;
    setMessages([...conversation, { ...reply }]);
    setBusy(false);
  };
  const ask = () => {
    const text = draft.trim();
    if (!text || busy) return;
    setDraft("");
    answer([...messages, { role: "user", content: text }]);
  };
  const again = () => answer(messages.slice(0, messages.findLastIndex((one) => one.role === "user") + 1));
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
    <div class="messages" role="log" aria-live="polite" aria-busy=${busy ? "true" : "false"}>
      ${messages.map((one) => html`<${Message} message=${one} show=${setShown} />`)}
      ${messages.length === 0 && html`<p class="note">Ask something. Enter sends, Shift+Enter starts a line, Escape stops.</p>`}
    </div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${shown && html`<div class="probabilities" role="status">
      <strong>${JSON.stringify(shown.token)} ${percent(shown.logprob)}</strong>${" of: "}
      ${(shown.top_logprobs || []).map((one) => html`<span>${JSON.stringify(one.token)} ${percent(one.logprob)}</span>`)}
    </div>`}
    <div class="ask">
      <textarea aria-label="Message" value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${onKey}></textarea>
      ${busy ? html`<button name="stop" onClick=${() => running.current?.abort()}>Stop</button>`
             : html`<button name="send" class="primary" disabled=${!draft.trim()} onClick=${ask}>Send</button>`}
      <button name="again" disabled=${busy || !messages.length} onClick=${again}>Regenerate</button>
      <button name="clear" disabled=${busy || !messages.length} onClick=${() => { setMessages([]); setError(""); setShown(null); }}>Clear</button>
    </div>`;
}

function body(options, conversation) {
  const turns = conversation.map(({ role, content }) => ({ role, content }));
  const sent = { messages: options.system ? [{ role: "system", content: options.system }, ...turns] : turns, stream: true,
    stream_options: { include_usage: true } };
  for (const name of ["model", "temperature", "top_p", "max_tokens", "seed"]) if (options[name] !== "") sent[name] = options[name];
  return options.probabilities ? { ...sent, logprobs: true, top_logprobs: 5 } : sent;
}

function Message({ message, show }) {
  const { role, content, tokens, id } = message;
  // The token that ends the answer is not part of its text.
  const shown = tokens && message.finish && !content.endsWith(tokens.at(-1)?.token) ? tokens.slice(0, -1) : tokens;
  const marked = shown && shown.length > 0;
  const kind = (one) => (one.logprob < Math.log(0.2) ? "token unlikely" : one.logprob < Math.log(0.6) ? "token unsure" : "token");
  return html`<div class="message ${role}">
    ${marked ? shown.map((one) => html`<span class=${kind(one)} tabindex="0" title=${percent(one.logprob)}
        onMouseEnter=${() => show(one)} onFocus=${() => show(one)}>${one.token}</span>`) : content}
    ${message.seconds !== undefined && html`<div class="facts">
      ${message.finish || "ended"} · first token ${seconds(message.first)} · ${seconds(message.seconds)}
      ${message.usage && ` · ${message.usage.completion_tokens} tokens`}
      ${id && html` · <a href="#/requests/${encodeURIComponent(id)}">timeline</a>`}
    </div>`}
  </div>`;
}
