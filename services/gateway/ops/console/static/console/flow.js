// Where the boxes and arrows of the topology's picture are, and how much flows along each arrow. Pure.

import { SERVICES, goneOf, returnedOf } from "./state.js";

export const MOST = 8;
// On a phone two boxes stand beside each other; more than two rows of a service are a group.
const MOST_NARROW = 4;
export const NARROW_BELOW = 720;
const COLUMNS = [["gateway"], ["tokenizer", "vision"], ["engine"], ["detokenizer"]];
// Widths and heights in pixels.
const CLIENTS = 88, GAP = 12, LANE = 24, ROW = 36, GROUP_MORE = 32;
const byName = (a, b) => a.id.localeCompare(b.id, "en", { numeric: true });

// The boxes of each service: {key, kind: "member" | "gone" | "group", service, id, …}. A lost member keeps its place by its name.
export function boxesOf(found, narrow) {
  const gone = goneOf(found), back = new Set(returnedOf(found).map((one) => one.instance_id));
  return Object.fromEntries(SERVICES.map((service) => {
    const members = found.members.filter((one) => one.service === service)
      .map((one) => ({ key: `${service}/${one.id}/${one.instance_id}`, kind: "member", service, id: one.id, member: one, back: back.has(one.instance_id) }));
    const lost = gone.filter((one) => one.service === service)
      .map((one) => ({ key: `${service}/${one.id}/${one.instance_id}`, kind: "gone", service, id: one.id, lost: one }));
    const all = [...members, ...lost].sort(byName);
    return [service, all.length > (narrow ? MOST_NARROW : MOST) ? [{ key: service, kind: "group", service, id: `${service}s`, members, lost }] : all];
  }));
}

// Returns {width, height, narrow, places: [{…box, x, y, w, h}], clients: {x, y, w, h}}.
export function layout(boxes, width, boxHeight) {
  const narrow = width < NARROW_BELOW;
  return { width, narrow, ...(narrow ? inRows : inColumns)(boxes, width, boxHeight) };
}

const heightOf = (box, h) => (box.kind === "group" ? h + GROUP_MORE : h);
const stacked = (boxes, services) => services.flatMap((service) => boxes[service] || []);

function inColumns(boxes, width, h) {
  const columns = COLUMNS.map((services) => stacked(boxes, services));
  const gap = Math.min(72, Math.max(36, (width - CLIENTS - LANE) * 0.042));
  const w = Math.min(232, (width - CLIENTS - LANE - 4 * gap) / 4);
  const between = (width - CLIENTS - LANE - 4 * w) / 4;
  const tall = (column) => column.reduce((sum, box) => sum + heightOf(box, h) + GAP, -GAP);
  const inner = Math.max(...columns.map(tall), h);
  const places = columns.flatMap((column, index) => {
    let y = (inner - tall(column)) / 2;
    return column.map((box) => {
      const placed = { ...box, x: CLIENTS + between + index * (w + between), y, w, h: heightOf(box, h) };
      y += placed.h + GAP;
      return placed;
    });
  });
  return { places, height: inner + LANE + 8, clients: { x: 0, y: inner / 2 - 36, w: CLIENTS, h: 72 } };
}

function inRows(boxes, width, h) {
  const wide = width - LANE;
  const places = [];
  let y = ROW + 48;
  for (const services of COLUMNS) {
    const row = stacked(boxes, services);
    for (let index = 0; index < row.length; index += 2) {
      const pair = row.slice(index, index + 2), w = pair.length === 1 ? wide : (wide - GAP) / 2;
      pair.forEach((box, side) => places.push({ ...box, x: side * (w + GAP), y, w, h }));
      y += h + GAP;
    }
    y += ROW - GAP;
  }
  return { places, height: y - ROW + 4, clients: { x: 0, y: 0, w: wide, h: 48 } };
}

// The arrows: {key, path, kind: "requests" | "tokens", rate, broken}. A pair's rate is the whole flow times the shares of both ends.
export function arrowsOf({ places, clients, narrow, width, height }, rates) {
  const of = (...services) => places.filter((one) => services.includes(one.service));
  const rate = (place, name) => membersOf(place).reduce((sum, one) => sum + (rates.get(one.instance_id)?.[name] || 0), 0);
  const line = narrow ? downwards : rightwards;
  const arrows = [];
  const add = (from, to, kind, value, path) => arrows.push({ key: `${from.key}>${to.key}>${kind}`, kind, path,
    rate: value, broken: from.kind === "gone" || to.kind === "gone" });
  const gateways = of("gateway"), prepared = of("tokenizer", "vision"), engines = of("engine"), detokenizers = of("detokenizer");
  const requests = total(gateways, rate, "requests"), tokens = total(engines, rate, "tokens");
  const start = { ...clients, key: "clients" };
  for (const one of gateways) {
    const share = sharesOf(gateways, rate, "requests")(one);
    add(start, one, "requests", rate(one, "requests"), line(start, one, -8));
    add(one, start, "tokens", tokens * (requests ? share : 1 / living(gateways)) * alive(one), line(start, one, 8, true));
    for (const other of prepared) add(one, other, "requests", rate(other, "requests") * (requests ? share : 1 / living(gateways)) * alive(one), line(one, other));
  }
  const work = sharesOf(engines, rate, "tokens"), decoding = sharesOf(detokenizers, rate, "events"), entering = sharesOf(gateways, rate, "requests");
  for (const one of engines) {
    for (const other of prepared) add(other, one, "requests", rate(other, "requests") * work(one), line(other, one));
    for (const other of detokenizers) add(one, other, "tokens", rate(one, "tokens") * decoding(other), line(one, other));
  }
  for (const one of detokenizers) for (const other of gateways) {
    add(one, other, "tokens", tokens * decoding(one) * entering(other), narrow ? upAgain(one, other, width) : aroundBelow(one, other, height));
  }
  return arrows;
}

const membersOf = (place) => (place.kind === "group" ? place.members.map((one) => one.member) : place.kind === "member" ? [place.member] : []);
const total = (places, rate, name) => places.reduce((sum, one) => sum + rate(one, name), 0);
const alive = (place) => Number(place.kind !== "gone");
const living = (places) => Math.max(1, places.filter(alive).length);

// The share of each place in a flow; equal shares of the living ones while nothing is counted.
function sharesOf(places, rate, name) {
  const sum = total(places, rate, name);
  return (place) => (sum ? rate(place, name) / sum : alive(place) / living(places));
}

const round = (value) => Math.round(10 * value) / 10;
const points = (...values) => values.map(round).join(" ");

function rightwards(from, to, off = 0, backwards = false) {
  const [x1, y1, x2, y2] = [from.x + from.w, from.y + from.h / 2 + off, to.x, to.y + to.h / 2 + off];
  const bend = (x2 - x1) / 2;
  return backwards ? `M${points(x2, y2)}C${points(x2 - bend, y2, x1 + bend, y1, x1, y1)}` : `M${points(x1, y1)}C${points(x1 + bend, y1, x2 - bend, y2, x2, y2)}`;
}

function downwards(from, to, off = 0, backwards = false) {
  const [x1, y1, x2, y2] = [from.x + from.w / 2 + off, from.y + from.h, to.x + to.w / 2 + off, to.y];
  const bend = (y2 - y1) / 2;
  return backwards ? `M${points(x2, y2)}C${points(x2, y2 - bend, x1, y1 + bend, x1, y1)}` : `M${points(x1, y1)}C${points(x1, y1 + bend, x2, y2 - bend, x2, y2)}`;
}

// From the right of a detokenizer below all boxes into the right of a gateway.
function aroundBelow(from, to, height) {
  const [x1, y1, x2, y2, low, r] = [from.x + from.w, from.y + from.h / 2, to.x + to.w, to.y + 0.8 * to.h, height - 6, 8];
  const [right, left] = [x1 + 14, x2 + 14];
  return `M${points(x1, y1)}H${round(right - r)}Q${points(right, y1, right, y1 + r)}V${round(low - r)}Q${points(right, low, right - r, low)}`
    + `H${round(left + r)}Q${points(left, low, left, low - r)}V${round(y2 + r)}Q${points(left, y2, left - r, y2)}H${round(x2)}`;
}

// From the right of a detokenizer along the right edge up into the right of a gateway.
function upAgain(from, to, width) {
  const [x1, y1, x2, y2, side, r] = [from.x + from.w, from.y + from.h / 2, to.x + to.w, to.y + to.h / 2, width - 6, 8];
  return `M${points(x1, y1)}H${round(side - r)}Q${points(side, y1, side, y1 - r)}V${round(y2 + r)}Q${points(side, y2, side - r, y2)}H${round(x2)}`;
}

// Dots a second for a flow of so many requests or tokens a second: few, and more for more.
export const dotsPerS = ({ kind, rate }) => (rate < 0.01 ? 0 : kind === "requests" ? 3 * (1 - Math.exp(-rate / 3)) : 4 * (1 - Math.exp(-Math.sqrt(rate) / 20)));
