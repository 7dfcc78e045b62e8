// The state of the system in one sentence. Pure: computed from the answer of /admin/topology and the tokens per second.

export const WORDS = { gateway: "gateway", tokenizer: "tokenizer", vision: "image service", engine: "engine", detokenizer: "detokenizer" };
export const SERVICES = Object.keys(WORDS);
// Without one of these, requests of a model wait.
const NEEDED = ["engine", "tokenizer", "detokenizer"];
const BACK_S = 60;
const NAMED = 2;

export const plural = (count, word) => `${count} ${count === 1 ? word : word === "process" ? "processes" : `${word}s`}`;
export const ago = (age_s) => (age_s < 99.5 ? `${Math.round(age_s)} s` : `${Math.round(age_s / 60)} min`);
export const whole = (value) => (value > 0 && value < 10 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
export const joined = (names) => (names.length > NAMED ? `${names.slice(0, NAMED).join(", ")} and ${names.length - NAMED} more` : names.join(" and "));
const named = (members) => joined(members.map((one) => one.id));
const verb = (members, one, many) => (members.length === 1 ? one : many);

// The lost members that have not come back under their names, the newest loss of each.
export function goneOf({ members, lost = [] }) {
  const living = new Set(members.map((one) => one.id));
  const seen = new Set();
  return lost.filter((one) => !living.has(one.id) && !seen.has(one.id) && seen.add(one.id));
}

// The members whose process was lost a short while ago and that are ready again in a new one, with the age of the loss. A process
// that was only silent for a moment is the same one as before.
export const returnedOf = ({ members, lost = [] }) => members
  .filter((one) => one.state === "ready")
  .map((one) => ({ ...one, age_s: lost.find((other) => other.id === one.id && other.instance_id !== one.instance_id)?.age_s ?? Infinity }))
  .filter((one) => one.age_s < BACK_S);

// Returns {tone, text}; `tone` is "good", "warn" or "bad". `text` without its numbers of seconds is what a screen reader is told.
export function stateOf(found, tokensPerS = 0) {
  const gone = goneOf(found);
  const wrong = missing(found, gone) || lossOf(found, gone) || faultOf(found);
  if (wrong) return { tone: "bad", text: wrong };
  const others = found.members.filter((one) => one.state !== "ready");
  const work = workOf(found, tokensPerS);
  if (others.length) return { tone: "warn", text: `${changes(others)} ${rest(found.members.length - others.length)} ${work}` };
  const back = returnedOf(found);
  const returned = back.length ? ` ${named(back)} ${verb(back, "was", "were")} lost ${ago(back[0].age_s)} ago and ${verb(back, "is", "are")} back.` : "";
  return { tone: "good", text: `All ${plural(found.members.length, "process")} are ready.${returned} ${work}` };
}

const rest = (count) => (count === 1 ? "One other process is ready." : `The other ${count} processes are ready.`);

function workOf({ members }, tokensPerS) {
  const sum = (name) => members.filter((one) => one.service === "gateway").reduce((total, one) => total + (one.load[name] || 0), 0);
  const running = sum("num_requests"), waiting = sum("num_waiting");
  if (!running) return "No request runs.";
  const parts = [`${plural(running, "request")} ${running === 1 ? "runs" : "run"}`];
  if (waiting) parts.push(`${plural(waiting, "sequence")} ${waiting === 1 ? "waits" : "wait"} for an engine`);
  if (tokensPerS > 0) parts.push(`${whole(tokensPerS)} tokens/s`);
  return `${parts.join(", ")}.`;
}

const modelsOf = (members) => [...new Set(members.map((one) => one.load.model).filter(Boolean))];

function missing({ members }, gone) {
  const models = modelsOf(members);
  for (const service of NEEDED) {
    // A request wakes an engine that sleeps, or waits until an operator does.
    const ready = members.filter((one) => one.service === service && ["ready", "sleeping"].includes(one.state));
    const without = models.filter((model) => !ready.some((one) => one.load.model === model));
    if (ready.length && !without.length) continue;
    const what = models.length > 1 && ready.length ? ` of the model ${joined(without)}` : "";
    const starting = members.filter((one) => one.service === service && one.state === "starting");
    const lost = gone.filter((one) => one.service === service);
    const why = lost.length ? ` ${named(lost)} ${verb(lost, "was", "were")} lost ${ago(lost[0].age_s)} ago.` : "";
    return `No ${WORDS[service]}${what} is ready: requests wait.${why}${starting.length ? ` ${named(starting)} ${verb(starting, "is", "are")} starting.` : ""}`;
  }
  return "";
}

// Of several losses the newest one's service is told; engines first, because they have the requests.
function lossOf(found, gone) {
  const service = ["engine", ...SERVICES].find((one) => gone.some((member) => member.service === one));
  if (!service) return "";
  const lost = gone.filter((one) => one.service === service);
  const others = gone.length - lost.length;
  const more = others ? ` ${others === 1 ? "One other process was" : `${others} other processes were`} lost, too.` : "";
  return `${named(lost)} ${verb(lost, "was", "were")} lost ${ago(lost[0].age_s)} ago${successors(found, service, lost)}.${more}`;
}

function successors({ members }, service, lost) {
  const ready = members.filter((one) => one.service === service && one.state === "ready");
  // Which model the lost member had is not told: with several, nobody can be named.
  if (!ready.length || modelsOf(members).length > 1) return "";
  const names = ready.length > NAMED ? `the other ${ready.length} ${WORDS[service]}s` : named(ready);
  const its = verb(lost, "its", "their");
  if (service !== "engine") return service === "gateway" ? `; clients go on at ${names}` : `; ${names} ${verb(ready, "does", "do")} ${its} work`;
  const runs = members.some((one) => one.service === "gateway" && one.load.num_requests > 0);
  return runs ? `; ${its} requests run on ${names}` : `; new requests go to ${names}`;
}

function faultOf({ members }) {
  const stalled = members.filter((one) => one.state === "stalled");
  const faulty = members.filter((one) => one.state === "faulty");
  if (faulty.length) return `${named(faulty)} computed wrong results and ${verb(faulty, "ends", "end")}.`;
  return stalled.length ? `${named(stalled)} ${verb(stalled, "makes", "make")} no progress; others do ${verb(stalled, "its", "their")} work.` : "";
}

function changes(members) {
  return ["starting", "draining", "sleeping"].map((state) => [state, members.filter((one) => one.state === state)]).filter(([, some]) => some.length)
    .map(([state, some]) => `${named(some)} ${verb(some, "is", "are")} ${state === "draining" ? "ending its work" : state}.`).join(" ");
}
