// The timeline of one request: which phase took the time, then every step and token, with zoom.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { every, getJson, save, seconds } from "../api.js";
import { colour, title } from "./phases.js";
import { Rerun } from "./rerun.js";

const LEFT = 104, LANE = 26;
// Lanes of the time during which no engine has the request, by cause.
const BEFORE = { turn: "gateway", admission: "gateway", delivery: "gateway", tokenization: "tokenizer", gateway_queue: "gateway queue", move: "gateway queue" };

export function Timeline({ name }) {
  const [found, setFound] = useState(null);
  const [error, setError] = useState("");
  const [chosen, setChosen] = useState(null);
  useEffect(() => {
    let stop = () => {};
    let after = 0;
    stop = every(1, async (signal) => {
      try {
        const next = await getJson(`v1/requests/${encodeURIComponent(name)}/timeline`, signal);
        setFound(next); setError("");
        // Engines tell of their steps a moment later than the request ends.
        if (next.state !== "running" && after++ > 1) stop();
      } catch (failure) { if (!signal.aborted) { setError(failure.message); stop(); } }
    });
    return () => stop();
  }, [name]);
  if (error) return html`<h1>Request</h1><p class="error" role="alert">${error}</p>`;
  if (!found) return html`<p class="loading">Reading…</p>`;
  return html`
    <h1>Request <span class="mono">${found.client_request_id || found.id}</span> <span class="state-${found.state}">${found.state}</span>${" "}
      <span class="note">${found.state === "running" ? "for" : "in"} ${seconds(found.duration_s)}</span></h1>
    <${Names} found=${found} />
    <${Verdict} found=${found} />
    <${Lanes} found=${found} chosen=${chosen} choose=${setChosen} />
    <p><button onClick=${() => save(`v1/requests/${encodeURIComponent(found.id)}/timeline?format=trace_events`,
      `${found.id}.trace.json`).catch((failure) => setError(failure.message))}>Save for Perfetto or speedscope</button></p>
    <${Rerun} name=${found.id} isRunning=${found.state === "running"} steps=${stepsOf(found)} step=${chosen} chooseStep=${setChosen} />
    <${Slowest} found=${found} choose=${setChosen} />
    <${Facts} found=${found} />`;
}

function Names({ found }) {
  const names = [["client's id (X-Request-Id)", found.client_request_id || "none given"], ["own id", found.id], ["API key", found.key], ["model", found.model],
    ["received", new Date(1000 * found.created).toLocaleTimeString([], { hourCycle: "h23" })], ["tokens", `${found.prompt_tokens} prompt, ${found.completion_tokens} output`]];
  return html`<dl class="names">${names.map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;
}

const label = ({ cause, where }) => `${title(cause)}${where ? ` ${cause === "move" ? "" : "on "}${where}` : ""}`;

// A gateway of an older version gives neither an explanation nor causes.
function Verdict({ found: { explanation = [], causes = [], meanwhile, ...found } }) {
  const total = found.duration_s || 1;
  const main = causes.reduce((a, b) => (b.duration_s > (a?.duration_s || 0) ? b : a), null);
  return html`
    ${explanation.length > 0 && html`<div class="verdict" role="status" style=${{ borderColor: main ? colour(main.cause) : "" }}>
      <strong>${explanation[0]}</strong>
      ${explanation.length > 1 && html`<p>${explanation.slice(1).join(" ")}</p>`}
      ${meanwhile && html`<${Meanwhile} found=${meanwhile} />`}</div>`}
    <div class="phases" aria-hidden="true">
      ${causes.map((one) => html`<div title="${label(one)} ${seconds(one.duration_s)}"
        style=${{ flexGrow: one.duration_s / total, background: colour(one.cause) }}></div>`)}
    </div>
    <ul class="legend">${causes.map((one) => html`<li title=${one.text} class=${one === main ? "main" : ""}>
      <span class="swatch" style=${{ background: colour(one.cause) }}></span>${label(one)} ${seconds(one.duration_s)}</li>`)}</ul>`;
}

// The requests that the engines computed while this one waited for them.
function Meanwhile({ found }) {
  const left = found.num_requests - found.num_hidden - found.requests.length;
  return html`<p>${found.requests.length ? found.text.replace(/\.$/, ", each for the time shown:") : found.text}</p>
    <ul class="meanwhile" aria-label="Requests computed meanwhile">${found.requests.map((one) => html`<li>
      <a class="mono" href="#/requests/${one.id}" title="${one.engines.join(", ")}, key ${one.key}">${one.client_request_id || one.id}</a>${" "}
      <span class="note">${seconds(one.overlap_s)}</span></li>`)}
      ${left > 0 && html`<li class="note">and ${left} more</li>`}</ul>`;
}

// All steps of a request in one list, each with its attempt.
const stepsOf = (found) => found.sequences.flatMap((sequence) => sequence.attempts.flatMap((attempt) =>
  attempt.steps.map((step) => ({ ...step, key: `${sequence.index}.${attempt.attempt}.${step.step}`, attempt, sequence: sequence.index }))));

function Lanes({ found, chosen, choose }) {
  const whole = Math.max(found.duration_s, 1e-6);
  const [range, setRange] = useState(null);
  const [from, to] = range || [0, whole];
  const svg = useRef(null);
  // One unit of the drawing is one pixel, so that its text can be read at every width.
  const [width, setWidth] = useState(1000);
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.max(240, Math.round(entry.contentRect.width))));
    observer.observe(svg.current);
    return () => observer.disconnect();
  }, []);
  const drag = useRef(null);
  const lanes = useMemo(() => lanesOf(found), [found]);
  const x = (time) => LEFT + (width - LEFT) * (time - from) / (to - from);
  const view = (low, high) => {
    const span = Math.min(whole, Math.max(high - low, whole / 20000));
    const start = Math.min(Math.max(0, low), whole - span);
    setRange(span >= whole ? null : [start, start + span]);
  };
  const zoom = (factor, middle = (from + to) / 2) => view(middle - (middle - from) * factor, middle + (to - middle) * factor);
  const pan = (share) => view(from + share * (to - from), to + share * (to - from));
  const timeAt = (event) => {
    const box = svg.current.getBoundingClientRect();
    return from + (to - from) * ((event.clientX - box.left) / box.width * width - LEFT) / (width - LEFT);
  };
  useEffect(() => {
    const turn = (event) => { if (event.ctrlKey || event.shiftKey || event.altKey) { event.preventDefault(); zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, timeAt(event)); } };
    svg.current.addEventListener("wheel", turn, { passive: false });
    return () => svg.current?.removeEventListener("wheel", turn);
  });
  const all = useMemo(() => stepsOf(found), [found]);
  const move = (by) => {
    const at = all.findIndex((one) => one.key === chosen?.key);
    const next = all[Math.min(all.length - 1, Math.max(0, at + by))];
    if (!next) return;
    choose(next);
    if (next.start_s < from || next.end_s > to) view(next.start_s - (to - from) / 2, next.start_s + (to - from) / 2);
  };
  const onKey = (event) => {
    const act = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => setRange(null),
      ArrowLeft: () => (event.shiftKey ? pan(-0.25) : move(-1)), ArrowRight: () => (event.shiftKey ? pan(0.25) : move(1)) }[event.key];
    if (act) { event.preventDefault(); act(); }
  };
  const height = 24 + LANE * lanes.length;
  return html`
    <div class="bar"><button onClick=${() => zoom(0.5)}>Zoom in</button><button onClick=${() => zoom(2)}>Zoom out</button>
      <button onClick=${() => pan(-0.5)}>←</button><button onClick=${() => pan(0.5)}>→</button>
      <button onClick=${() => setRange(null)}>Whole</button>
      <span class="note">${seconds(from)} to ${seconds(to)} · keys + − 0, arrows choose a step, Shift+arrows move, Ctrl+wheel zooms</span></div>
    <svg ref=${svg} class="timeline" viewBox="0 0 ${width} ${height}" tabindex="0" role="application" aria-label="Timeline" onKeyDown=${onKey}
      onPointerDown=${(e) => { drag.current = [e.clientX, from, to]; }}
      onPointerMove=${(e) => {
        if (!drag.current || !(e.buttons & 1)) return;
        const [start, low, high] = drag.current;
        const by = (start - e.clientX) / svg.current.getBoundingClientRect().width * (high - low);
        view(low + by, high + by);
      }} onPointerUp=${() => { drag.current = null; }}>
      ${ticks(from, to, width).map((time) => html`<g><line class="axis" x1=${x(time)} x2=${x(time)} y1="16" y2=${height} />
        <text x=${x(time) + 2} y="12">${time ? seconds(time) : "0 s"}</text></g>`)}
      ${lanes.map((lane, row) => html`<g transform="translate(0 ${24 + LANE * row})">
        ${(lane.spans || []).map((one) => block(one, x, from, to, width, lane.attempt && one.cause !== "engine_queue"))}
        ${lane.attempt && steps(lane, x, from, to, width, chosen, choose)}${lane.pieces && pieces(lane, x, from, to)}
        <rect x="0" y="0" width=${LEFT - 2} height=${LANE - 2} fill="var(--ground)" /><text x="4" y="16">${lane.title}</text></g>`)}
    </svg>
    <p role="status" class="chosen">${chosen ? describe(chosen) : html`<span class="note">Choose a step to see what it computed.</span>`}</p>`;
}

// Every moment from the arrival to the end is in a span, and every span in one lane.
function lanesOf(found) {
  const spans = found.spans || [];
  const before = ["gateway", "tokenizer", "gateway queue"].map((name) => ({
    title: (name === "tokenizer" && found.tokenizer) || name, spans: spans.filter((one) => BEFORE[one.cause] === name) }));
  const isIn = (attempt) => ({ where, start_s: start, cause }) => !BEFORE[cause] && where === attempt.engine && start >= attempt.placed_s - 1e-6
    && (attempt.lost_s === null || start < attempt.lost_s);
  // The spans are those of the sequence that ended last.
  const last = (one) => Math.max(0, ...one.pieces.map((piece) => piece.arrived_s));
  const told = found.sequences.reduce((a, b) => (a && last(a) >= last(b) ? a : b), null);
  return [...(spans.length ? before : []), ...found.sequences.flatMap((one) => [
    ...one.attempts.map((attempt) => ({ title: attempt.engine, attempt, index: one.index, spans: one === told ? spans.filter(isIn(attempt)) : [] })),
    { title: "arrived", pieces: one.pieces, at: "arrived_s" }, { title: "written", pieces: one.pieces, at: "written_s" },
  ])];
}

// A span, with its name inside if there is room; a faint one lies behind the steps of its engine.
function block(one, x, from, to, width, isFaint) {
  if (one.end_s < from || one.start_s > to) return null;
  const begin = Math.max(LEFT, x(one.start_s)), end = Math.min(width, x(one.end_s)), text = `${title(one.cause)} ${seconds(one.end_s - one.start_s)}`;
  return html`<g class="span" data-cause=${one.cause}><rect x=${begin} y="2" width=${Math.max(1, end - begin)} height="18" rx="2" fill=${colour(one.cause)}
    opacity=${isFaint ? 0.25 : 1}><title>${text}</title></rect>
    ${!isFaint && end - begin > 7 * text.length && html`<text class="inside" x=${begin + 6} y="15">${text}</text>`}</g>`;
}

function ticks(from, to, width) {
  const raw = (to - from) / Math.max(2, width / 120), power = 10 ** Math.floor(Math.log10(raw));
  const step = power * ([1, 2, 5, 10].find((one) => one * power >= raw) || 10);
  return Array.from({ length: Math.ceil((to - from) / step) + 1 }, (_, number) => (Math.ceil(from / step) + number) * step).filter((time) => time <= to);
}

function steps({ attempt, index, spans }, x, from, to, full, chosen, choose) {
  const shown = attempt.steps.filter((one) => one.end_s >= from && one.start_s <= to);
  const end = attempt.lost_s ?? attempt.steps.at(-1)?.end_s ?? attempt.placed_s;
  return html`
    ${spans.length === 0 && html`<rect x=${Math.max(LEFT, x(attempt.placed_s))} y="8" width=${Math.max(0, x(end) - Math.max(LEFT, x(attempt.placed_s)))}
      height="6" fill="var(--line)" />`}
    ${shown.map((one) => {
      const key = `${index}.${attempt.attempt}.${one.step}`;
      const width = Math.max(0.6, x(one.end_s) - x(one.start_s));
      return html`<rect key=${key} class="step ${one.kind} ${chosen?.key === key ? "chosen" : ""}" x=${x(one.start_s)} y="2" width=${width} height="18"
        fill=${one.preempted_before ? "var(--bad)" : `var(--${one.kind})`} onClick=${() => choose({ ...one, key, attempt, sequence: index })}>
        <title>step ${one.step}: ${one.kind}, ${one.num_tokens} tokens, batch ${one.batch_size}</title></rect>`;
    })}
    ${attempt.lost_s !== null && (x(attempt.lost_s) > 0.75 * full ? html`<text x=${x(attempt.lost_s) - 3} y="16" text-anchor="end">${attempt.reason} ✕</text>`
      : html`<text x=${x(attempt.lost_s) + 3} y="16">✕ ${attempt.reason}</text>`)}`;
}

function pieces({ pieces: found, at }, x, from, to) {
  const shown = found.filter((one) => one[at] !== null && one[at] >= from && one[at] <= to);
  return html`<path stroke="var(--faint)" d=${shown.map((one) => `M${x(one[at]).toFixed(2)} 4v14`).join("")} />`;
}

function describe(one) {
  return html`<strong>Step ${one.step}</strong> on ${one.attempt.engine} (${one.kind}): ${one.num_tokens} tokens from position ${one.position},
    ${" "}${one.num_output} new; took ${seconds(one.end_s - one.start_s)}, ${seconds(one.gap_s)} after the step before; batch of ${one.batch_size} sequences and
    ${" "}${one.batch_tokens} tokens; ${one.num_waiting} waited, ${one.num_free_blocks} blocks were free${one.preempted_before ? "; preempted before it" : ""}.`;
}

function Slowest({ found, choose }) {
  const steps = stepsOf(found).filter((one) => one.gap_s !== null).sort((a, b) => b.gap_s - a.gap_s);
  const slow = steps.slice(0, 10);
  if (!slow.length) return null;
  const usual = steps[Math.floor(steps.length / 2)].gap_s;
  return html`<h2>Longest gaps</h2><div class="scroll" tabindex="0" role="region" aria-label="Longest gaps"><table><thead><tr><th>Step</th><th>Kind</th>
    <th class="number">Gap</th><th class="number">Step took</th><th class="number">Batch</th><th class="number">Batch tokens</th><th class="number">Waiting</th>
    <th>Why</th></tr></thead><tbody>${slow.map((one) => html`<tr key=${one.key}>
    <td><button onClick=${() => choose(one)}>${one.step}</button></td><td>${one.kind}</td><td class="number">${seconds(one.gap_s)}</td>
    <td class="number">${seconds(one.end_s - one.start_s)}</td><td class="number">${one.batch_size}</td><td class="number">${one.batch_tokens}</td>
    <td class="number">${one.num_waiting}</td><td>${reason(one, usual)}</td></tr>`)}</tbody></table></div>`;
}

function reason(one, usual) {
  if (one.preempted_before) return "preempted: no KV blocks were free";
  if (one.gap_s > 2 * (one.end_s - one.start_s)) return "waited for its turn";
  if (one.kind === "prefill") return "computed its prompt";
  if (one.gap_s > 0.1 && one.gap_s > 10 * usual) return "the engine computed or stood still much longer than usual";
  if (one.batch_tokens > 2 * one.batch_size) return "the step computed prompts of others too";
  return one.batch_size > 1 ? "shared the step with others" : "";
}

function origin(kv) {
  if (!kv) return "";
  const found = [[kv.cache, "from the cache"], [kv.disk, "from the disk"], [kv.prefill_engine, "from a prefill engine"], [kv.computed, `computed (${kv.why.replace("_", " ")})`]];
  return found.filter(([count]) => count).map(([count, where]) => `${count} ${where}`).join(", ");
}

function Facts({ found }) {
  const rows = [["client's id (X-Request-Id)", found.client_request_id], ["own id", found.id], ["model", found.model], ["API key", found.key], ["gateway", found.gateway],
    ["tokenizer", found.tokenizer], ["received", new Date(1000 * found.created).toLocaleString()],
    ["prompt tokens", `${found.prompt_tokens} (${found.cached_tokens} from the cache)`], ["output tokens", found.completion_tokens],
    ["finish", found.finish_reasons.join(", ")], ["detokenizer's work", seconds(found.detokenizer_work_s)], ["events not kept", found.dropped_events]];
  return html`<h2>Facts</h2><dl class="card">${rows.filter(([, value]) => value !== null && value !== "").map(([title, value]) => html`<dt>${title}</dt><dd>${value}</dd>`)}</dl>
    <h2>Placements</h2><div class="scroll" tabindex="0" role="region" aria-label="Placements"><table><thead><tr><th>Sequence</th><th>Attempt</th><th>Engine</th><th>Detokenizer</th>
    <th class="number">Sent</th><th class="number">Accepted</th><th class="number">Lost</th><th>Reason</th><th>KV of the prompt</th></tr></thead><tbody>
    ${found.sequences.flatMap((one) => one.attempts.map((attempt) => html`<tr><td>${one.index}</td><td>${attempt.attempt}</td><td>${attempt.engine}</td>
      <td>${attempt.detokenizer || "–"}</td><td class="number">${seconds(attempt.placed_s)}</td><td class="number">${seconds(attempt.accepted_s)}</td>
      <td class="number">${seconds(attempt.lost_s)}</td><td>${attempt.reason || ""}</td><td>${origin(attempt.kv)}</td></tr>`))}</tbody></table></div>`;
}
