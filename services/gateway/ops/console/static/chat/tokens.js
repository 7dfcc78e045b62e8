// The tokens of an answer with the probability of each, and what else the model might have said.

import { Component, html, useRef, useState } from "../vendor/preact.js";

const PART = 100;
const percent = (logprob) => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const kind = ([, logprob]) => (logprob < Math.log(0.2) ? "token unlikely" : logprob < Math.log(0.6) ? "token unsure" : "token");

// A part that is full does not change any more, so that a long answer costs only its newest tokens.
class Part extends Component {
  shouldComponentUpdate(next) { return next.tokens.length !== this.props.tokens.length; }
  render({ tokens, from }) {
    return html`<span>${tokens.map((one, index) => html`<span class=${kind(one)} data-at=${from + index}
      tabindex=${from + index === 0 ? "0" : "-1"} title=${percent(one[1])}>${one[0]}</span>`)}</span>`;
  }
}

// The tokens are one stop of the Tab key: the arrow keys go from one to the next.
export function Tokens({ tokens }) {
  const [at, setAt] = useState(null);
  const box = useRef(null);
  const show = ({ target }) => { if (target.dataset.at) setAt(Number(target.dataset.at)); };
  const onKey = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, Home: -tokens.length, End: tokens.length }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = Math.min(tokens.length - 1, Math.max(0, (at ?? 0) + by));
    const found = box.current.querySelector(`[data-at="${next}"]`);
    box.current.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    found.setAttribute("tabindex", "0");
    found.focus();
  };
  const parts = Array.from({ length: Math.ceil(tokens.length / PART) }, (_, index) => index * PART);
  const shown = tokens[at];
  return html`<div class="alternatives">
    <div ref=${box} class="answer-tokens" role="group" aria-label="Tokens; the arrow keys show their probabilities" onKeyDown=${onKey} onMouseOver=${show} onFocusIn=${show} onClick=${show}>
      ${parts.map((from) => html`<${Part} key=${from} from=${from} tokens=${tokens.slice(from, from + PART)} />`)}</div>
    <div class="probabilities" role="status">${shown ? html`<strong>${JSON.stringify(shown[0])} ${percent(shown[1])}</strong> of:${" "}
        ${shown[2].map(([token, logprob]) => html`<span>${JSON.stringify(token)} ${percent(logprob)}</span>`)}`
      : html`<span class="note">Point at a token, or use the arrow keys: dotted ones were unsure, underlined ones unlikely.</span>`}</div>
  </div>`;
}
