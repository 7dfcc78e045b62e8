// One chart over time: grid, axes, the values at the moment under the pointer, and marks of events. uPlot draws it.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import uPlot from "../vendor/uplot.js";

const HEIGHT = 160, COLOURS = ["--accent", "--gateway_queue", "--decode"];
const MARKS = { lost: "--bad", joined: "--good", draining: "--warm" };
const MINUTE = 60;
const X_STEPS = [MINUTE, 2 * MINUTE, 5 * MINUTE, 10 * MINUTE, 15 * MINUTE, 30 * MINUTE];
const cursors = uPlot.sync("charts");
export const rate = (value) => (value < 10 ? Number(value.toFixed(1)).toString() : Math.round(value).toLocaleString("en"));
// Labels of an axis are round numbers: without a last zero, and without a unit at 0.
const onAxis = (format) => (value) => (value === 0 ? "0" : format(value).replace(/\.0+(?=\D|$)/, ""));
export const clock = (time, withSeconds = true) => new Date(1000 * time)
  .toLocaleTimeString([], { hourCycle: "h23", hour: "2-digit", minute: "2-digit", ...(withSeconds ? { second: "2-digit" } : {}) });

const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
// The canvas takes no light-dark(): a hidden element resolves the colour.
function resolved(name) {
  const probe = document.createElement("span");
  probe.style.color = colourOf(name);
  document.body.append(probe);
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return colour;
}

// Draws again when the theme changes.
function useTheme() {
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const next = () => setTurn((before) => before + 1);
    const scheme = matchMedia("(prefers-color-scheme: dark)"), watched = new MutationObserver(next);
    scheme.addEventListener("change", next);
    watched.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
    return () => { scheme.removeEventListener("change", next); watched.disconnect(); };
  }, []);
  return turn;
}

function options({ width, format, top, palette, live, onMove, count }) {
  const axis = { stroke: palette.ink, grid: { stroke: palette.line, width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  return {
    width, height: HEIGHT, legend: { show: false }, padding: [8, 24, 0, 0],
    cursor: { y: false, points: { size: 7 }, sync: { key: cursors.key }, drag: { x: false, y: false } },
    scales: { x: { time: true, range: (plot, low, high) => [low, high] }, y: { range: (plot, low, high) => [0, top || nice(high)] } },
    axes: [{ ...axis, space: 64, size: 24, gap: 6, incrs: X_STEPS, values: (plot, splits) => splits.map((one) => clock(one, false)) },
      { ...axis, size: 64, splits: (plot, index, low, high) => parts(low, high, top ? 2 : 3), values: (plot, splits) => splits.map(live.current.isSilent ? () => "" : onAxis(format)) }],
    series: [{}, ...Array.from({ length: count }, (_, index) => ({ stroke: palette.lines[index], width: 1.6, spanGaps: false, points: { show: false },
      fill: index === 0 ? palette.fill : undefined }))],
    hooks: { setCursor: [(plot) => onMove(plot.cursor.idx ?? null)], drawAxes: [(plot) => drawMarks(plot, live.current.events, palette)] },
  };
}

const parts = (low, high, count) => Array.from({ length: count + 1 }, (_, index) => low + (high - low) * index / count);

// The end of a scale: the next number whose three parts are short.
export function nice(high) {
  if (!(high > 0)) return 3;
  const power = 10 ** Math.floor(Math.log10(high));
  return [1.5, 3, 6, 9, 15].map((one) => one * power).find((one) => one >= high);
}

function drawMarks(plot, events, palette) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([4, 4]);
  ctx.lineWidth = 1.5 * devicePixelRatio;
  // A loss is drawn over the return that follows at once.
  for (const one of [...events].sort((a, b) => (a.kind === "lost") - (b.kind === "lost"))) {
    const x = Math.round(plot.valToPos(one.time, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.strokeStyle = palette.marks[one.kind];
    ctx.globalAlpha = one.kind === "lost" ? 1 : 0.5;
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
  }
  ctx.restore();
}

// time: unix seconds; series: {name: values}; range: [from, to]; format: from a number to its text; top: the end of the scale, if it is known;
// silence: what the chart says instead, if it has nothing but zeros and nulls.
export function Chart({ title, format, time, series, range, events = [], top = null, silence = "", wide = false }) {
  const holder = useRef(null), plot = useRef(null), live = useRef(null);
  const [at, setAt] = useState(null);
  const theme = useTheme();
  const names = Object.keys(series);
  const first = Math.max(0, time.findIndex((one) => one >= range[0]));
  const data = useMemo(() => [time.slice(first), ...names.map((name) => series[name].slice(first))], [time, first, ...names.map((name) => series[name])]);
  const isSilent = silence && !data.slice(1).some((values) => values.some((value) => value));
  live.current = { events, isSilent };
  useEffect(() => {
    const lines = COLOURS.map(resolved);
    const palette = { ink: resolved("--faint"), line: resolved("--soft"), lines, fill: lines[0].replace(/^rgb\((.*)\)$/, "rgba($1, 0.08)"),
      marks: Object.fromEntries(Object.entries(MARKS).map(([kind, name]) => [kind, resolved(name)])) };
    const made = new uPlot(options({ width: holder.current.clientWidth, format, top, palette, live, onMove: setAt, count: names.length }), data, holder.current);
    plot.current = made;
    cursors.sub(made);
    const observer = new ResizeObserver(([entry]) => made.setSize({ width: Math.round(entry.contentRect.width), height: HEIGHT }));
    observer.observe(holder.current);
    return () => { observer.disconnect(); cursors.unsub(made); made.destroy(); };
  }, [theme, top, names.join()]);
  useEffect(() => {
    plot.current.setData(data, false);
    plot.current.setScale("x", { min: range[0], max: range[1] });
  }, [data, range[0], range[1], theme, top, names.join()]);
  const shown = at === null || at >= data[0].length ? null : at;
  const valueOf = (index) => { const value = shown === null ? data[index + 1].at(-1) : data[index + 1][shown]; return value === null || value === undefined ? "–" : format(value); };
  const key = (event) => {
    const last = data[0].length - 1;
    const to = { ArrowLeft: (shown ?? last + 1) - 1, ArrowRight: (shown ?? last - 1) + 1, Home: 0, End: last, Escape: -1 }[event.key];
    if (to === undefined || last < 0) return;
    event.preventDefault();
    if (to < 0 && event.key === "Escape") { plot.current.setCursor({ left: -10, top: -10 }); return; }
    const index = Math.min(last, Math.max(0, to));
    plot.current.setCursor({ left: plot.current.valToPos(data[0][index], "x"), top: 10 });
  };
  const values = isSilent ? silence : names.map((name, index) => `${name} ${valueOf(index)}`).join(", ");
  const when = shown === null ? "now" : clock(data[0][shown]);
  const near = shown === null ? [] : events.filter((one) => Math.abs(one.time - data[0][shown]) <= (range[1] - range[0]) / 120);
  return html`<section class="chart ${wide ? "wide" : ""}"><h2>${title} <span class="when">${when}</span></h2>
    <p class="values">${names.map((name, index) => html`<span class="one"><span class="swatch" style=${{ background: `var(${COLOURS[index]})` }}></span>${name}
      ${" "}<span class="value">${isSilent && shown === null ? "–" : valueOf(index)}</span></span>`)}
      ${near.map((one) => html`<span class="event ${one.kind}">${one.id} ${one.kind}</span>`)}</p>
    <div class="plot" ref=${holder} tabindex="0" role="application" onKeyDown=${key}
      aria-label=${`${title}, from ${clock(range[0], false)} to ${clock(range[1], false)}. ${values} ${when}. Arrow keys go along the time.`}>
      ${isSilent && html`<span class="silence"><span>${silence}</span></span>`}</div>
  </section>`;
}
