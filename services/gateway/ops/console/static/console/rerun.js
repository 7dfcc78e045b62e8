// The recorded output of a request, token by token: replayed and compared, or forked from any token on.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { ApiError, getJson, postJson, streamed } from "../api.js";

const PAGE = 1000;
// Name, title, and the bounds of each parameter that a fork may change.
const PARAMETERS = [["temperature", "Temperature", 0, 2, 0.1], ["seed", "Seed", -(2 ** 53) + 1, 2 ** 53 - 1, 1], ["max_tokens", "Max tokens", 1, 10 ** 7, 1]];
const visible = (text) => (text === "" ? "∅" : text.replaceAll("\n", "↵\n"));
const quoted = (sequence, at) => (sequence.texts.length ? JSON.stringify(sequence.texts[at]) : `token ${sequence.token_ids[at]}`);

// The steps in which a sequence was computed give their new tokens from this place of its output on.
const firstToken = (step, sequence) =>
  (step.kind === "prefill" ? step.position + step.num_tokens : step.position + 1) - sequence.num_prompt_tokens;
const gave = (step, sequence, at) => step.num_output > 0 && at >= firstToken(step, sequence) && at < firstToken(step, sequence) + step.num_output;

// name: of the request; steps: all of its steps; step: the chosen one; chooseStep: called with another one.
export function Rerun({ name, isRunning, steps, step, chooseStep }) {
  const [output, setOutput] = useState(null);
  const [missing, setMissing] = useState("");
  const [error, setError] = useState("");
  const [index, setIndex] = useState(0);
  const [at, setAt] = useState(null);
  const [comparison, setComparison] = useState(null);
  useEffect(() => {
    if (isRunning) return;
    getJson(`v1/requests/${encodeURIComponent(name)}/output`).then(setOutput, (failure) => {
      if (failure instanceof ApiError && failure.status === 404) setMissing(failure.message);
      else setError(failure.message);
    });
  }, [name, isRunning]);
  const sequence = output?.sequences[index];
  useEffect(() => {
    if (!sequence || !step || step.sequence !== index || !step.num_output || (at !== null && gave(step, sequence, at))) return;
    const first = firstToken(step, sequence);
    if (first >= 0 && first < sequence.token_ids.length) setAt(first);
  }, [step]);
  const chooseStepOf = (which, place) => {
    const found = steps.findLast((one) => one.sequence === which && gave(one, output.sequences[which], place));
    if (found) chooseStep(found);
  };
  const show = (which, next) => { setIndex(which); setAt(next); chooseStepOf(which, next); };
  // Engines tell of their steps a moment later than the request ends, maybe after a token was chosen.
  useEffect(() => { if (sequence && at !== null && !(step && step.sequence === index)) chooseStepOf(index, at); }, [steps.length]);
  const differences = new Map((comparison?.sequences || []).filter((one) => !one.equal).map((one) => [one.index, one.position]));
  return html`<h2>Output</h2>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${isRunning && html`<p class="note">When the request has ended, its output can be replayed, and forked from any token.</p>`}
    ${missing && html`<${Missing} message=${missing} />`}
    ${output && html`
      ${output.sequences.length > 1 && html`<div class="bar"><label>Output<select name="sequence" value=${index}
        onChange=${(event) => { setIndex(Number(event.target.value)); setAt(null); }}>
        ${output.sequences.map((one) => html`<option value=${one.index}>${one.index}</option>`)}</select></label></div>`}
      <${Tokens} key=${index} sequence=${sequence} at=${at} differs=${differences.get(index)} choose=${(next) => show(index, next)} />
      ${output.refusal ? html`<p class="note" role="status">${output.refusal}</p>` : html`
        <${Replay} name=${output.id} engines=${[...new Set(output.sequences.flatMap((one) => one.engines))]}
          result=${comparison} setResult=${setComparison} show=${show} />
        <${Fork} output=${output} sequence=${sequence} at=${at} />`}`}`;
}

// Without recorded content the buttons tell how to get it.
function Missing({ message }) {
  const [asked, setAsked] = useState(false);
  return html`<div class="bar"><button name="replay" onClick=${() => setAsked(true)}>Replay</button>
      <button name="fork" onClick=${() => setAsked(true)}>Fork</button></div>
    <div role="status">${asked && html`<p class="error">${message}</p>
      <p class="note">Prompts and tokens are kept, in memory, by a server that is started with <code>antiphon serve --record-content-mb 64</code>.</p>`}</div>`;
}

function Tokens({ sequence, at, differs, choose }) {
  const count = sequence.token_ids.length;
  const [page, setPage] = useState(0);
  const box = useRef(null);
  useEffect(() => { if (at !== null) setPage(Math.floor(Math.min(at, count - 1) / PAGE)); }, [at]);
  useEffect(() => { box.current?.querySelector("[aria-selected=true]")?.scrollIntoView({ block: "nearest" }); }, [at, page]);
  if (!count) return html`<p class="note">No token was generated.</p>`;
  const onKey = (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100, Home: -count, End: count }[event.key];
    if (by !== undefined) {
      event.preventDefault();
      choose(Math.min(count - 1, Math.max(0, at === null ? (by > 0 ? 0 : count - 1) : at + by)));
    } else if (event.key === "Enter" && at !== null) {
      event.preventDefault();
      document.querySelector("form.fork input:not(:disabled)")?.focus();
    }
  };
  const from = page * PAGE;
  return html`<p class="note">Choose a token (arrow keys; Enter goes to the fork below). ${sequence.num_begun > 0 && `The first ${sequence.num_begun} were given, as this request is a fork itself.`}</p>
    ${count > PAGE && html`<div class="bar"><button disabled=${page === 0} onClick=${() => setPage(page - 1)}>Earlier</button>
      <button disabled=${from + PAGE >= count} onClick=${() => setPage(page + 1)}>Later</button>
      <span class="note">tokens ${from} to ${Math.min(count, from + PAGE) - 1} of ${count}</span></div>`}
    <div ref=${box} class="tokens" role="listbox" tabindex="0" aria-label="Tokens of the output" aria-activedescendant=${at === null ? undefined : `token-${at}`} onKeyDown=${onKey}>
      ${sequence.token_ids.slice(from, from + PAGE).map((id, offset) => {
        const place = from + offset;
        const kind = `${place < sequence.num_begun ? "begun" : ""} ${place === differs ? "differs" : ""}`;
        return html`<span key=${place} id=${`token-${place}`} role="option" class=${kind} aria-selected=${place === at ? "true" : "false"}
          aria-label=${`${place}: ${quoted(sequence, place)}`} title=${`token ${id} at position ${place}`}
          onClick=${() => choose(place)}>${sequence.texts.length ? visible(sequence.texts[place]) : ` ${id}`}</span>`;
      })}
    </div>`;
}

function Replay({ name, engines, result, setResult, show }) {
  const [engine, setEngine] = useState("");
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState("");
  const run = async () => {
    setBusy(true); setError(""); setResult(null);
    try { setResult(await postJson(`v1/requests/${encodeURIComponent(name)}/replay`, engine ? { engine } : {})); }
    catch (failure) { setError(failure.message); }
    setBusy(false);
  };
  return html`<h3>Replay</h3>
    <div class="bar"><label>On<select name="engine" value=${engine} onChange=${(event) => setEngine(event.target.value)}>
      <option value="">any engine</option>${engines.map((one) => html`<option value=${one}>${one}</option>`)}</select></label>
      <button name="replay" disabled=${busy} onClick=${run}>${busy ? "Running again…" : "Run again and compare"}</button></div>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    <div role="status" class="comparison">${result && html`<${Comparison} result=${result} show=${show} />`}</div>`;
}

function Comparison({ result, show }) {
  const count = result.sequences.reduce((sum, one) => sum + one.num_tokens, 0);
  const where = result.engines.length ? ` on ${result.engines.join(", ")}` : "";
  return html`
    ${result.equal ? html`<p class="equal"><strong>Equal</strong>: all ${count} tokens came out the same${where}.</p>`
      : html`<p class="error"><strong>Different</strong>${where}.</p>`}
    ${result.sequences.filter((one) => !one.equal).map((one) => html`<div class="card difference">
      <p>Output ${one.index} first differs at position ${one.position} of ${one.num_tokens}.${" "}
        <button onClick=${() => show(one.index, one.position)}>Show the token</button></p>
      <dl><dt>recorded</dt><dd>${side(one.recorded)}</dd><dt>now</dt><dd>${side(one.replayed)}</dd>
        <dt>gap of the log probabilities</dt><dd>${one.logprob_gap === null ? "unknown: one of them is not among the likeliest" : one.logprob_gap.toFixed(6)}</dd></dl>
      ${one.logprob_gap !== null && one.logprob_gap < 0.01 && html`<p class="note">Both tokens were about equally likely, so rounding decided.</p>`}
    </div>`)}
    ${changed("model", result.model)}${changed("configuration", result.configuration)}
    <p><a href="#/requests/${encodeURIComponent(result.replay_id)}">Timeline of the replay</a></p>`;
}

const side = (token) => (token === null ? "the end" : `${JSON.stringify(token.text)} (token ${token.token_id})${token.logprob === null ? "" : `, log probability ${token.logprob.toFixed(6)}`}`);
const words = (value) => (Array.isArray(value) ? value.join(", ") : value);
const changed = (what, { recorded, now }) => words(recorded) !== words(now) && html`<p class="note">The ${what} was ${words(recorded)} and is ${words(now)}.</p>`;

function Fork({ output, sequence, at }) {
  // A drawn seed is too large for this page's numbers, and each output has its own: without another one the server takes that.
  const [values, setValues] = useState({ temperature: output.temperature, seed: "", max_tokens: output.max_tokens ?? "" });
  const [fork, setFork] = useState(null);
  const [error, setError] = useState("");
  const running = useRef(null);
  useEffect(() => () => running.current?.abort(), []);
  if (output.is_beam_search) return html`<h3>Fork</h3><p class="note">A beam search cannot be forked, because its outputs depend on each other.</p>`;
  const run = async (event) => {
    event.preventDefault();
    running.current?.abort();
    const controller = (running.current = new AbortController());
    const changes = Object.fromEntries(Object.entries(values).filter(([name, value]) => value !== "" && (name === "seed" || value !== output[name])));
    const next = { id: "", text: "", kept: sequence.texts.slice(0, at).join(""), position: at, finish: "" };
    setError(""); setFork({ ...next });
    try {
      const body = { position: at, index: sequence.index, stream: true, ...changes };
      for await (const chunk of streamed(`v1/requests/${encodeURIComponent(output.id)}/fork`, body, controller.signal)) {
        const choice = chunk.choices[0];
        next.id = chunk.id;
        next.text += choice?.text || (choice?.token_ids || []).map((id) => ` ${id}`).join("");
        next.finish = choice?.finish_reason || next.finish;
        setFork({ ...next });
      }
      next.finish ||= "ended";
    } catch (failure) {
      // Browsers report an aborted stream with errors of different names.
      const stopped = controller.signal.aborted;
      if (!stopped) setError(failure.message);
      next.finish = stopped ? "stopped" : "failed";
    }
    if (running.current === controller) { running.current = null; setFork(next.id ? { ...next } : null); }
  };
  const none = at === null;
  return html`<h3>Fork</h3>
    <form class="bar fork" onSubmit=${run}>
      ${PARAMETERS.map(([name, title, min, max, step]) => html`<label>${title}<input type="number" name=${name} min=${min} max=${max} step=${step}
        disabled=${none} value=${values[name]} placeholder=${{ seed: "as recorded", max_tokens: "as many as fit" }[name] || ""}
        onInput=${(event) => setValues({ ...values, [name]: event.target.value === "" ? "" : Number(event.target.value) })} /></label>`)}
      <button name="fork" class="primary" type="submit" disabled=${none}>Fork here</button>
      ${fork && !fork.finish && html`<button type="button" name="stop" onClick=${() => running.current?.abort()}>Stop</button>`}
    </form>
    <p class="note" role="status">${none ? "Choose the token from which a new output shall begin."
      : `Keeps the ${at} tokens before ${quoted(sequence, at)} and chooses this one and those after it anew. Max tokens counts the whole output.`}</p>
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${fork && html`<section class="message assistant pane" aria-label="Output of the fork" aria-live="polite" aria-busy=${fork.finish ? "false" : "true"}>${text(fork)}
      <div class="facts">from position ${fork.position} · ${fork.finish || "running"}${fork.id && html` · <a href="#/requests/${encodeURIComponent(fork.id)}">Timeline of the fork</a>`}</div></section>`}`;
}

// The text begins with the kept one, perhaps without its first space. Where special tokens are left out, nothing is marked.
function text({ text: whole, kept }) {
  const found = [kept, kept.trimStart()].find((one) => one && whole.startsWith(one));
  return found ? html`<span class="kept">${found}</span>${whole.slice(found.length)}` : whole;
}
