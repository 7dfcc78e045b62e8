// Names and colours of the phases of a request, and of the causes that its time is divided among.

import { html } from "../vendor/preact.js";
import { seconds } from "../api.js";

// In the order of time.
export const ORDER = ["turn", "admission", "tokenization", "gateway_queue", "engine_queue", "prefill", "decode", "move", "preemption", "delivery"];
export const title = (phase) => phase.replace("_", " ");
export const colour = (phase) => `var(--${phase})`;

// The phases of one request as a bar, as long as its share of `whole` seconds.
export function PhaseBar({ phases, whole }) {
  return html`<div class="bars" aria-hidden="true">${Object.entries(phases).map(([phase, duration]) => html`<div title="${title(phase)} ${seconds(duration)}"
    style=${{ width: `${100 * duration / whole}%`, background: colour(phase) }}></div>`)}</div>`;
}

export const Legend = ({ phases }) => html`<ul class="legend">${phases.map((phase) => html`<li>
  <span class="swatch" style=${{ background: colour(phase) }}></span>${title(phase)}</li>`)}</ul>`;
