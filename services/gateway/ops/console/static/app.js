// The frame of the console: views by the address's hash, the theme, and the question for a key.

import { html, render, useEffect, useRef, useState } from "./preact.js";
import { onKeyNeeded, storeKey, storedKey } from "./api.js";
import { Chat } from "./chat.js";
import { Charts } from "./charts.js";
import { Engine } from "./engine.js";
import { Requests } from "./requests.js";
import { Timeline } from "./timeline.js";
import { Topology } from "./topology.js";

const VIEWS = [["chat", "Chat"], ["topology", "Topology"], ["requests", "Requests"], ["charts", "Charts"]];
const THEMES = { "": "system", light: "light", dark: "dark" };

const place = () => location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);

function App() {
  const [[view, item], setPlace] = useState(place());
  const [asked, setAsked] = useState("");
  const [keyNumber, setKeyNumber] = useState(0);
  useEffect(() => {
    const follow = () => setPlace(place());
    addEventListener("hashchange", follow);
    onKeyNeeded(setAsked);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const current = VIEWS.some(([name]) => name === view) ? view : "chat";
  const done = (key) => { if (key !== null) { storeKey(key); setKeyNumber(keyNumber + 1); } setAsked(""); };
  return html`
    <header>
      <strong>Antiphon</strong>
      <nav aria-label="Views">
        ${VIEWS.map(([name, title]) => html`
          <a href="#/${name}" aria-current=${name === current ? "page" : undefined}>${title}</a>`)}
      </nav>
      <${Theme} />
      <button onClick=${() => setAsked("The key is kept until this tab is closed.")}>Key</button>
    </header>
    <main key=${keyNumber}>
      ${current === "chat" && html`<${Chat} />`}
      ${current === "topology" && (item ? html`<${Engine} key=${item} name=${item} />` : html`<${Topology} />`)}
      ${current === "charts" && html`<${Charts} />`}
      ${current === "requests" && (item ? html`<${Timeline} key=${item} name=${item} />` : html`<${Requests} />`)}
    </main>
    ${asked && html`<${KeyDialog} message=${asked} done=${done} />`}`;
}

function Theme() {
  const [theme, setTheme] = useState(localStorage.getItem("antiphon-theme") || "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    localStorage.setItem("antiphon-theme", theme);
  }, [theme]);
  return html`<select aria-label="Theme" value=${theme} onChange=${(event) => setTheme(event.target.value)}>
    ${Object.entries(THEMES).map(([name, title]) => html`<option value=${name}>${title}</option>`)}
  </select>`;
}

function KeyDialog({ message, done }) {
  const dialog = useRef(null);
  const [key, setKey] = useState(storedKey());
  useEffect(() => {
    const shown = dialog.current;
    shown.showModal();
    // Closing gives the focus back to where it was.
    return () => shown.close();
  }, []);
  return html`<dialog ref=${dialog} aria-labelledby="key-title" onCancel=${() => done(null)}>
    <h1 id="key-title">API key</h1>
    <p>${message}</p>
    <form onSubmit=${(event) => { event.preventDefault(); done(key.trim()); }}>
      <label>Key<input type="password" autocomplete="off" autofocus value=${key} onInput=${(e) => setKey(e.target.value)} /></label>
      <p class="bar"><button class="primary" type="submit">Use</button>
      <button type="button" onClick=${() => done(null)}>Close</button></p>
    </form>
  </dialog>`;
}

document.getElementById("app").replaceChildren();
render(html`<${App} />`, document.getElementById("app"));
