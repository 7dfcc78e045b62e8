// The state of the system: a sentence, the picture of the topology, and every process with its figures.

import { html, useEffect, useState } from "../vendor/preact.js";
import { StateLine, useLive } from "./live.js";
import { MOST } from "./flow.js";
import { Picture, bytes, inGib, kvShare, numbersOf, percent } from "./picture.js";
import { SERVICES, WORDS, ago, goneOf, plural, whole } from "./state.js";

const byName = (a, b) => a.id.localeCompare(b.id, "en", { numeric: true });

export function Overview() {
  const live = useLive();
  const [chosen, setChosen] = useState("");
  const { now, error } = live;
  useEffect(() => {
    if (chosen) document.querySelector(".details, tbody.open")?.scrollIntoView({ block: "nearest" });
  }, [chosen]);
  const choose = (box) => setChosen(chosen === box.key ? "" : box.key);
  return html`<h1>Overview</h1>
    <${StateLine} live=${live} large=${true} />
    ${now && html`<${Picture} live=${live} chosen=${chosen} choose=${choose} />
      <${Details} live=${live} chosen=${chosen} close=${() => setChosen("")} />
      <${Processes} live=${live} chosen=${chosen} choose=${choose} />
      <p class="note">Version ${now.version}${now.uptime_s === undefined ? "" : `, up for ${upFor(now.uptime_s)}`}${now.gateway ? `, as ${now.gateway} sees it` : ""}.
        ${" "}Rates are means of the last seconds.${error ? "" : " Memory is what a process holds in RAM; bars of memory compare the processes."}</p>`}`;
}

export function upFor(seconds) {
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${plural(days, "day")} ${hours % 24} h`;
  return hours ? `${hours} h ${minutes % 60} min` : minutes ? `${minutes} min` : `${Math.floor(seconds)} s`;
}

// What the chosen process tells of itself.
function Details({ live: { now, rates }, chosen, close }) {
  const one = now.members.find((member) => `${member.service}/${member.id}/${member.instance_id}` === chosen);
  if (!one) return null;
  const { load } = one, rate = rates.get(one.instance_id) || {};
  const rows = [["model", load.model], ["requests so far", load.accepted_requests ?? (one.service === "detokenizer" ? null : load.num_requests)],
    ["waiting for an engine", one.service === "gateway" ? plural(load.num_waiting, "sequence") : null], ["streams now", load.num_streams],
    ["texts sent so far", load.text_events], ["tokens asked for again", load.resends], ["tokens read so far", load.num_tokens],
    ["format of tool calls", load.tool_format], ["images found in its cache", load.num_hits],
    ["processor", rate.cpu === undefined || rate.cpu === null ? null : `${percent(rate.cpu)} of ${plural(one.resources.num_cores, "core")}`],
    ["memory", one.resources ? bytes(one.resources.rss_bytes) : null],
    ["messages on the bus", rate.messages === null || rate.messages === undefined ? null : `${whole(rate.messages)} a second`],
    ["last heard", `${one.heartbeat_age_s.toFixed(1)} s ago, expected every ${one.heartbeat_interval_s} s`],
    ["id of this start", one.instance_id]];
  return html`<section class="card details" aria-label="Details of ${one.id}"><h2>${one.id} <span class="state-${one.state}">${one.state}</span>
      <button class="close" aria-label="Close the details" onClick=${close}>✕</button></h2>
    <${FactList} rows=${rows} /></section>`;
}

// Titles and values; without those that have no value.
export const FactList = ({ rows }) => html`<dl class="facts">${rows.filter(([, value]) => value !== null && value !== undefined && value !== "")
  .map(([title, value]) => html`<div><dt>${title}</dt><dd>${value}</dd></div>`)}</dl>`;

function Processes({ live: { now, rates }, chosen, choose }) {
  const gone = goneOf(now);
  const hasGpus = now.members.some((one) => one.resources?.gpus.length);
  return html`<h2 id="processes">Processes</h2>
    <div class="scroll" tabindex="0" role="region" aria-labelledby="processes"><table class="processes"><thead><tr><th>Process</th><th>State</th><th>Work now</th>
      <th class="number">CPU</th><th class="number">Memory</th>${hasGpus && html`<th>GPU memory</th>`}<th class="number">KV cache</th><th class="number">Last heard</th></tr></thead>
    ${SERVICES.map((service) => {
      const members = now.members.filter((one) => one.service === service).sort(byName), lost = gone.filter((one) => one.service === service);
      const isMany = members.length + lost.length > MOST, isOpen = !isMany || chosen === service;
      return html`<tbody key=${service} class=${isMany && isOpen ? "open" : ""}>${isMany && html`<tr><th scope="rowgroup" colspan="8"><button aria-expanded=${isOpen ? "true" : "false"}
          onClick=${() => choose({ key: service })}>${isOpen ? "Hide" : "Show"} the ${members.length} ${WORDS[service]}s</button></th></tr>`}
        ${isOpen && members.map((one) => html`<${Row} key=${one.instance_id} one=${one} rates=${rates} hasGpus=${hasGpus} />`)}
        ${isOpen && lost.map((one) => html`<tr key=${one.instance_id} class="gone"><td>${one.id}</td><td class="state-lost">lost</td>
          <td colspan=${hasGpus ? 5 : 4}>${one.reason}</td><td class="number">${ago(one.age_s)} ago</td></tr>`)}
        ${members.length + lost.length === 0 && service !== "vision" && html`<tr class="gone"><td colspan="8">No ${WORDS[service]} runs.</td></tr>`}</tbody>`;
    })}</table></div>`;
}

function Row({ one, rates, hasGpus }) {
  const [number, more] = numbersOf(one.service, [one], rates);
  const cpu = rates.get(one.instance_id)?.cpu, { resources, load } = one;
  const late = one.heartbeat_age_s > 3 * one.heartbeat_interval_s;
  return html`<tr><td>${one.service === "engine" ? html`<a href="#/topology/${encodeURIComponent(one.id)}">${one.id}</a>` : one.id}</td>
    <td class="state-${one.state}">${one.state}</td><td>${number}, ${more}</td>
    <td class="number">${cpu === undefined || cpu === null ? "–" : percent(cpu)}</td><td class="number">${resources ? bytes(resources.rss_bytes) : "–"}</td>
    ${hasGpus && html`<td>${resources?.gpus.map((gpu) => `${inGib(gpu.used_bytes)} of ${inGib(gpu.total_bytes)} GiB`).join(", ") || "–"}</td>`}
    <td class="number">${load.num_blocks ? percent(kvShare(one)) : ""}</td>
    <td class="number ${late ? "state-failed" : ""}">${one.heartbeat_age_s.toFixed(1)} s ago</td></tr>`;
}
