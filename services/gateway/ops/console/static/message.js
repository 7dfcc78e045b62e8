// What one message of the conversation looks like, and what is sent for it.

import { html, useState } from "./preact.js";
import { seconds } from "./api.js";

export const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

// The message in the form of the API.
export function sent({ role, content, images, calls, callId }) {
  if (role === "tool") return { role, tool_call_id: callId, content };
  if (calls?.length) return { role, content: content || null, tool_calls: calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } })) };
  if (!images?.length) return { role, content };
  return { role, content: [{ type: "text", text: content }, ...images.map((url) => ({ type: "image_url", image_url: { url } }))] };
}

// Adds the pieces of tool calls in a chunk of a stream to the calls so far.
export function addCalls(calls, pieces) {
  for (const { index, id, function: part } of pieces || []) {
    calls[index] ??= { id: "", name: "", text: "" };
    calls[index].id ||= id || "";
    calls[index].name ||= part?.name || "";
    calls[index].text += part?.arguments || "";
  }
}

export function Message({ message, show, reply }) {
  const { role, content, tokens, id, images, calls } = message;
  // The token that ends the answer is not part of its text; those of a tool call are shown as the call.
  const shown = tokens && message.finish && !content.endsWith(tokens.at(-1)?.token) ? tokens.slice(0, -1) : tokens;
  const marked = shown && shown.length > 0 && !calls?.length;
  return html`<div class="message ${role}">
    ${role === "tool" && html`<div class="facts">result of ${message.name}</div>`}
    ${images?.map((url, number) => html`<img src=${url} alt=${`Image ${number + 1}`} />`)}
    ${marked ? html`<${Tokens} tokens=${shown} show=${show} />` : content}
    ${calls?.map((one) => html`<div class="call"><strong>${one.name}</strong> <code>${one.text}</code></div>`)}
    ${reply && calls?.length > 0 && html`<${Results} calls=${calls} reply=${reply} />`}
    ${message.seconds !== undefined && html`<div class="facts">
      ${message.finish || "ended"} · first token ${seconds(message.first)} · ${seconds(message.seconds)}
      ${message.usage && ` · ${message.usage.completion_tokens} tokens`}
      ${id && html` · <a href="#/requests/${encodeURIComponent(id)}">timeline</a>`}
    </div>`}
  </div>`;
}

// The tokens are one stop of the Tab key: the arrow keys go from one to the next.
function Tokens({ tokens, show }) {
  const [at, setAt] = useState(0);
  const kind = (one) => (one.logprob < Math.log(0.2) ? "token unlikely" : one.logprob < Math.log(0.6) ? "token unsure" : "token");
  const onKey = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -tokens.length, End: tokens.length }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    event.currentTarget.children[Math.min(tokens.length - 1, Math.max(0, at + by))].focus();
  };
  return html`<span role="group" aria-label="Tokens; the arrow keys show their probabilities" onKeyDown=${onKey}>${tokens.map((one, index) => html`<span class=${kind(one)}
    tabindex=${index === at ? "0" : "-1"} title=${percent(one.logprob)} onMouseEnter=${() => show(one)}
    onFocus=${() => { setAt(index); show(one); }}>${one.token}</span>`)}</span>`;
}

// Asks for the result of each call. The person at the console stands in for the program that would run the tools.
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
