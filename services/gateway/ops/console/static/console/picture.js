// The picture of the topology: a box for each process, and arrows along which requests and tokens flow.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { sumOf } from "./live.js";
import { NARROW_BELOW, arrowsOf, boxesOf, dotsPerS, layout } from "./flow.js";
import { Dots } from "./dots.js";
import { WORDS, ago, plural, whole } from "./state.js";

const BASE = 82, BAR = 18, WORST = 2;

export const bytes = (value) => (value >= 1e9 ? `${inGib(value)} GiB` : `${Math.round(value / 2 ** 20)} MiB`);
export const inGib = (value) => (value / 2 ** 30).toFixed(value < 100 * 2 ** 30 ? 1 : 0);
export const percent = (share) => (share > 0 && share < 0.01 ? "<1 %" : `${Math.round(100 * share)} %`);
export const kvShare = ({ load }) => (load.num_blocks ? 1 - load.num_free_blocks / load.num_blocks : 0);

// chosen: the key of the box whose details are shown; choose(box): of a box that has no page of its own.
export function Picture({ live: { now, rates, error }, chosen, choose }) {
  const frame = useRef(null), dots = useRef(null), mover = useRef(null);
  const [width, setWidth] = useState(0);
  const moves = useMoves();
  useLayoutEffect(() => {
    const observer = new ResizeObserver(([entry]) => setWidth(Math.round(entry.contentRect.width)));
    observer.observe(frame.current);
    return () => observer.disconnect();
  }, []);
  const narrow = width < NARROW_BELOW;
  const hasGpus = now.members.some((one) => one.resources?.gpus.length);
  const plan = width ? layout(boxesOf(now, narrow), width, BASE + BAR * (hasGpus ? 3 : 2)) : null;
  const arrows = plan ? arrowsOf(plan, error ? new Map() : rates) : [];
  useEffect(() => {
    if (!dots.current) return;
    mover.current ||= new Dots(dots.current);
    if (!moves) { mover.current.stop(); return; }
    const paths = new Map([...frame.current.querySelectorAll("path[data-key]")].map((path) => [path.dataset.key, path]));
    mover.current.follow(arrows.map((one) => ({ ...one, path: paths.get(one.key) })));
  });
  useEffect(() => () => mover.current?.stop(), []);
  const gateways = now.members.filter((one) => one.service === "gateway");
  const most = Math.max(1, ...now.members.map((one) => one.resources?.rss_bytes || 0));
  return html`<section class="picture ${narrow ? "narrow" : ""} ${error ? "old" : ""}" ref=${frame} aria-label="Topology" style=${{ height: plan ? `${plan.height}px` : "" }}>
    ${plan && html`<svg aria-hidden="true" width=${plan.width} height=${plan.height} viewBox="0 0 ${plan.width} ${plan.height}">
        <defs>${["idle", "requests", "tokens", "broken"].map((kind) => html`<marker id="tip-${kind}" class="tip ${kind}" markerUnits="userSpaceOnUse" markerWidth="9" markerHeight="9"
          refX="8" refY="4.5" orient="auto"><path d="M0 1L8 4.5L0 8Z" /></marker>`)}</defs>
        ${arrows.map((one) => html`<${Arrow} key=${one.key} arrow=${one} />`)}
        <g class="dots" ref=${dots}></g></svg>
      <div class="clients" style=${place(plan.clients)}><strong>Clients</strong><span>${whole(sumOf(gateways, rates, "requests"))}</span><span>requests/s</span></div>
      <ul>${plan.places.map((one) => html`<li key=${one.key} style=${place(one)}>
        <${Box} box=${one} rates=${rates} most=${most} hasGpus=${hasGpus} isChosen=${chosen === one.key} choose=${choose} /></li>`)}</ul>`}
  </section>`;
}

const place = ({ x, y, w, h }) => ({ left: `${x}px`, top: `${y}px`, width: `${w}px`, height: `${h}px` });
const rateText = (value, unit) => `${whole(value)} ${unit}`;

function useMoves() {
  const [moves, setMoves] = useState(true);
  useEffect(() => {
    const asked = matchMedia("(prefers-reduced-motion: reduce)");
    const follow = () => setMoves(!asked.matches);
    follow();
    asked.addEventListener("change", follow);
    return () => asked.removeEventListener("change", follow);
  }, []);
  return moves;
}

function Arrow({ arrow }) {
  const flow = arrow.broken ? 0 : dotsPerS(arrow);
  const kind = arrow.broken ? "broken" : flow ? arrow.kind : "idle";
  return html`<path class="arrow ${kind}" data-key=${arrow.key} d=${arrow.path} stroke-width=${(1.25 + flow).toFixed(2)} marker-end="url(#tip-${kind})" />`;
}

// The one number of each service that matters, and what stands beside it.
export function numbersOf(service, members, rates) {
  const sum = (name) => sumOf(members, rates, name);
  const load = (name) => members.reduce((total, one) => total + (one.load[name] || 0), 0);
  const running = load("num_running"), waiting = load("num_waiting");
  return {
    gateway: () => [plural(load("num_requests"), "request"), waiting ? `${waiting} waiting for an engine` : rateText(sum("requests"), "new/s")],
    tokenizer: () => [rateText(sum("requests"), "prompts/s"), `${load("num_requests").toLocaleString("en")} so far`],
    vision: () => [rateText(sum("requests"), "images/s"), `${load("num_requests").toLocaleString("en")} so far`],
    engine: () => [rateText(sum("tokens"), "tokens/s"), `${running} running, ${waiting} waiting`],
    detokenizer: () => [plural(load("num_streams"), "stream"), rateText(sum("events"), "texts/s")],
  }[service]();
}

function Box({ box, rates, most, hasGpus, isChosen, choose }) {
  if (box.kind === "gone") {
    return html`<div class="box gone"><${Head} id=${box.id} state="lost" />
      <span class="number">lost ${ago(box.lost.age_s)} ago</span><span class="more">${box.lost.reason}</span></div>`;
  }
  if (box.kind === "group") return html`<${Group} box=${box} rates=${rates} isChosen=${isChosen} choose=${choose} />`;
  const { member } = box;
  const [number, more] = numbersOf(box.service, [member], rates);
  const content = html`<${Head} id=${box.id} state=${member.state} back=${box.back} />
    <span class="number">${number}</span><span class="more">${more}</span>
    <${Bars} member=${member} cpu=${rates.get(member.instance_id)?.cpu} most=${most} hasGpus=${hasGpus} />`;
  const tone = box.back ? "back" : member.state;
  const name = `${box.id}, ${member.state}, ${number}, ${more}`;
  return box.service === "engine"
    ? html`<a class="box ${tone}" href="#/topology/${encodeURIComponent(box.id)}" aria-label=${name}>${content}</a>`
    : html`<button class="box ${tone}" aria-pressed=${isChosen ? "true" : "false"} aria-label=${name} onClick=${() => choose(box)}>${content}</button>`;
}

const Head = ({ id, state, back = false }) => html`<span class="head"><strong>${id}</strong><span class="state-${state}">${back ? "back" : state}</span></span>`;

function Bars({ member: { resources }, cpu, most, hasGpus }) {
  if (!resources) return html`<span class="bars-of note">no figures of its resources</span>`;
  const gpu = resources.gpus.reduce((sum, one) => ({ used: sum.used + one.used_bytes, total: sum.total + one.total_bytes }), { used: 0, total: 0 });
  return html`<span class="bars-of">
    <${Bar} title="CPU" share=${cpu || 0} text=${cpu === null || cpu === undefined ? "–" : percent(cpu)} />
    <${Bar} title="Memory" share=${resources.rss_bytes / most} text=${bytes(resources.rss_bytes)} isCalm=${true} />
    ${hasGpus && gpu.total > 0 && html`<${Bar} title="GPU" share=${gpu.used / gpu.total} text=${percent(gpu.used / gpu.total)} />`}</span>`;
}

const Bar = ({ title, share, text, isCalm = false }) => html`<span class="bar-of"><span>${title}</span>
  <span class="track"><span class=${!isCalm && share > 0.9 ? "fill high" : "fill"} style=${{ width: `${Math.min(100, 100 * share)}%` }}></span></span><span class="value">${text}</span></span>`;

// More than a few members of a service in one box: how many are in which state, their sums, and the worst ones.
function Group({ box, rates, isChosen, choose }) {
  const members = box.members.map((one) => one.member);
  const counts = new Map();
  for (const one of members) counts.set(one.state, (counts.get(one.state) || 0) + 1);
  const [number, more] = numbersOf(box.service, members, rates);
  const states = [...counts].map(([state, count]) => `${count} ${state}`).concat(box.lost.length ? [`${box.lost.length} lost`] : []);
  const tone = box.lost.length ? "gone" : [...counts.keys()].some((state) => state !== "ready") ? "draining" : "ready";
  return html`<button class="box group ${tone}" aria-expanded=${isChosen ? "true" : "false"} onClick=${() => choose(box)}>
    <span class="head"><strong>${members.length} ${WORDS[box.service]}s</strong><span class="note">${isChosen ? "hide" : "list"}</span></span>
    <span class="number">${number}</span><span class="more">${more}</span>
    <span class="more">${states.join(", ")}</span>
    <span class="more worst">${worstOf(box, rates).join(", ")}</span></button>`;
}

// Lost members first, then those in trouble, then the fullest engines or the busiest processes.
export function worstOf({ members, lost }, rates) {
  const bad = [...lost.map((one) => `${one.id} lost ${ago(one.lost.age_s)} ago`),
    ...members.filter((one) => one.member.state !== "ready").map((one) => `${one.id} ${one.member.state}`)];
  const cpu = (one) => rates.get(one.member.instance_id)?.cpu || 0;
  const full = (one) => (one.service === "engine" ? kvShare(one.member) : cpu(one));
  const busy = members.filter((one) => full(one) > 0.5).sort((a, b) => full(b) - full(a))
    .map((one) => `${one.id} ${one.service === "engine" ? "KV cache" : "CPU"} ${percent(full(one))}`);
  return [...bad, ...busy].slice(0, WORST);
}
