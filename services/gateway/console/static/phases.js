// Names and colours of the phases of a request, and of the causes that its time is divided among.

import { html } from "./preact.js";
import { seconds } from "./api.js";

// In the order of time; the reason is what a slow request is marked with.
const REASONS = {
  turn: "turn", admission: "admission", tokenization: "tokenizer", gateway_queue: "gateway queue", engine_queue: "engine queue", prefill: "prompt",
  decode: "output", move: "move to another engine", preemption: "preemption", delivery: "delivery",
};
export const title = (phase) => phase.replace("_", " ");
export const reason = (phase) => REASONS[phase] || title(phase);
export const colour = (phase) => `var(--${phase})`;

// The phases of one request as a bar, as long as its share of `whole` seconds.
export function PhaseBar({ phases, whole }) {
  return html`<div class="bars" aria-hidden="true">${Object.entries(phases).map(([phase, duration]) => html`<div title="${title(phase)} ${seconds(duration)}"
    style=${{ width: `${100 * duration / whole}%`, background: colour(phase) }}></div>`)}</div>`;
}

export const Legend = ({ phases }) => html`<ul class="legend">${phases.map((phase) => html`<li>
  <span class="swatch" style=${{ background: colour(phase) }}></span>${title(phase)}</li>`)}</ul>`;

export const ORDER = Object.keys(REASONS);
