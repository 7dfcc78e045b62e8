// The drawer with the settings of all conversations, and the facts of the model.

import { html } from "../vendor/preact.js";
import { DEFAULTS, NUMBERS } from "./request.js";

const EXAMPLE = JSON.stringify([{ type: "function", function: { name: "get_weather", description: "The weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }], null, 1);
const SCHEMA = JSON.stringify({ type: "object", properties: { answer: { type: "string" } }, required: ["answer"] }, null, 1);
const PLACEHOLDERS = { max_tokens: "as many as fit", seed: "drawn" };

export function Settings({ options, change, reset, model, close }) {
  const select = (name, title, values) => html`<label>${title}<select name=${name} value=${options[name]} onChange=${(e) => change(name, e.target.value)}>
    ${values.map(([value, told]) => html`<option value=${value}>${told}</option>`)}</select></label>`;
  const number = ([name, title, min, max, step]) => html`<label>${title}<input type="number" name=${name} value=${options[name]} min=${min} max=${max} step=${step}
    placeholder=${PLACEHOLDERS[name] || "the model's"} onInput=${(e) => change(name, e.target.value === "" ? "" : Number(e.target.value))} /></label>`;
  const area = (name, title, rows, placeholder = "") => html`<label class="wide">${title}<textarea name=${name} rows=${rows} spellcheck="false" placeholder=${placeholder} value=${options[name]}
    onInput=${(e) => change(name, e.target.value)}></textarea></label>`;
  const isChanged = Object.keys(DEFAULTS).some((name) => name !== "model" && options[name] !== DEFAULTS[name]);
  return html`<aside class="drawer" aria-label="Settings">
    <div class="drawer-head"><h2>Settings</h2><button name="reset" disabled=${!isChanged} onClick=${reset}>Reset</button><button name="close-settings" onClick=${close}>Close</button></div>
    ${area("system", "System message", 3)}
    <h3>Sampling</h3>
    <div class="grid">${NUMBERS.map(number)}</div>
    ${area("stop", "Stop texts, one a line", 2)}
    <h3>Thinking</h3>
    <div class="grid">
      ${select("thinking", "Thinking", [["", "the model's"], ["on", "on"], ["off", "off"]])}
      ${select("effort", "Effort", [["", "the model's"], ["low", "low"], ["medium", "medium"], ["high", "high"]])}
      <label>Thinking tokens<input type="number" name="thinking_budget" min="0" placeholder="no limit" value=${options.thinking_budget}
        onInput=${(e) => change("thinking_budget", e.target.value === "" ? "" : Number(e.target.value))} /></label>
    </div>
    <h3>Output</h3>
    <div class="grid">${select("format", "Format", [["text", "text"], ["json", "JSON"], ["schema", "JSON by a schema"]])}</div>
    ${options.format === "schema" && area("schema", "JSON schema", 6, SCHEMA)}
    <label class="row"><input type="checkbox" name="probabilities" checked=${options.probabilities} onChange=${(e) => change("probabilities", e.target.checked)} />Keep the probabilities of tokens</label>
    <h3>Tools</h3>
    ${area("tools", "Functions that the model may call, as in the API's tools", 5, EXAMPLE)}
    <div class="grid">${select("tool_choice", "Choice", ["auto", "required", "none"].map((one) => [one, one]))}<button name="example" onClick=${() => change("tools", EXAMPLE)}>Example</button></div>
    <h3>More</h3>
    ${area("more", "More parameters of the request, as a JSON object", 2, '{"min_tokens": 20}')}
    <h3>Model</h3>
    ${model ? html`<dl class="facts-of-model"><dt>name</dt><dd>${model.id}</dd><dt>context</dt><dd>${model.max_model_len.toLocaleString()} tokens</dd>
      <dt>takes</dt><dd>${(model.input_modalities || ["text"]).join(", ")}</dd><dt>for</dt><dd>${model.tasks.join(", ")}</dd>${model.parent && html`<dt>adapter of</dt><dd>${model.parent}</dd>`}
      <dt>files</dt><dd class="mono">${model.root}</dd></dl>` : html`<p class="note">No model is served now.</p>`}
  </aside>`;
}
