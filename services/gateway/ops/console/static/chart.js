// One chart of the last values of a few series.

import { html } from "./preact.js";

export const POINTS = 150;
export const rate = (value) => value.toFixed(value < 10 ? 1 : 0);
const COLOURS = ["var(--accent)", "var(--gateway_queue)", "var(--decode)"];

// points: at most POINTS objects with a number, or null, for each series; format: from a number to its text.
export function Chart({ title, format, points }) {
  const names = Object.keys(points.at(-1) || {});
  const top = Math.max(1e-9, ...points.flatMap((one) => Object.values(one).filter((value) => value !== null)));
  const path = (name) => {
    let pen = "M";
    return points.map((one, index) => {
      if (one[name] === null) { pen = "M"; return ""; }
      const place = `${pen}${(400 * (index + POINTS - points.length) / (POINTS - 1)).toFixed(1)} ${(110 - 100 * one[name] / top).toFixed(1)}`;
      pen = "L";
      return place;
    }).join("");
  };
  const latest = (name) => points.findLast((one) => one[name] !== null)?.[name];
  return html`<section class="chart"><h2>${title}</h2>
    <svg viewBox="0 0 400 116" role="img" aria-label=${`${title}: ${names.map((name) => `${name} ${latest(name) === undefined ? "none" : format(latest(name))}`).join(", ")}`}>
      <line class="axis" x1="0" x2="400" y1="110" y2="110" /><text x="2" y="10">${points.length ? format(top) : ""}</text>
      ${names.map((name, index) => html`<path fill="none" stroke-width="1.6" stroke=${COLOURS[index]} d=${path(name)} />`)}
    </svg>
    <ul class="legend">${names.map((name, index) => html`<li><span class="swatch" style=${{ background: COLOURS[index] }}></span>${name}
      ${" "}<span class="value">${latest(name) === undefined ? "–" : format(latest(name))}</span></li>`)}</ul>
  </section>`;
}
