// The frame of the console: views by the address's hash, the rail beside them, the theme, and the question for a key.

import { html, render, useEffect, useRef, useState } from "./vendor/preact.js";
import { getJson, onKeyNeeded, storeKey, storedKey } from "./api.js";
import { Chat } from "./chat/chat.js";
import { Conversations } from "./chat/conversations.js";
import { Help } from "./help.js";
import { Charts } from "./console/charts.js";
import { Engine } from "./console/engine.js";
import { Requests } from "./console/requests.js";
import { Timeline } from "./console/timeline.js";
import { Overview } from "./console/overview.js";

const VIEWS = [["chat", "Chat"], ["overview", "Overview"], ["requests", "Requests"], ["charts", "Charts"]];
const THEMES = { "": "Theme: system", light: "Theme: light", dark: "Theme: dark" };

const place = () => {
  const [view, item] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  return view === "topology" ? ["overview", item] : VIEWS.some(([name]) => name === view) ? [view, item] : ["chat", item];
};
const titleOf = (view, item) => `${item && view !== "chat" ? `${item} · ` : ""}${VIEWS.find(([name]) => name === view)[1]} · Antiphon`;

function App() {
  const [[view, item], setPlace] = useState(place());
  const [asked, setAsked] = useState("");
  const [keyNumber, setKeyNumber] = useState(0);
  const [menu, setMenu] = useState(false);
  const [help, setHelp] = useState(false);
  useEffect(() => {
    const follow = () => { setPlace(place()); setMenu(false); };
    const onKey = (event) => { if (event.key === "Escape") setMenu(false); };
    addEventListener("hashchange", follow);
    follow(); // the address may have changed since the first drawing
    addEventListener("keydown", onKey);
    onKeyNeeded(setAsked);
    return () => { removeEventListener("hashchange", follow); removeEventListener("keydown", onKey); };
  }, []);
  useEffect(() => { if (view !== "chat") document.title = titleOf(view, item); }, [view, item]);
  const done = (key) => { if (key !== null) { storeKey(key); setKeyNumber(keyNumber + 1); } setAsked(""); };
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.querySelector("main").focus(); }}>To the content</a>
    <header class="top"><button name="menu" aria-expanded=${menu ? "true" : "false"} aria-controls="rail" aria-label="Menu" onClick=${() => setMenu(!menu)}>☰</button>
      <strong>Antiphon</strong><span class="where">${VIEWS.find(([name]) => name === view)[1]}</span></header>
    ${menu && html`<div class="veil" onClick=${() => setMenu(false)}></div>`}
    <aside id="rail" class=${menu ? "rail open" : "rail"}>
      <strong class="brand"><img src="console/icon.svg" alt="" />Antiphon</strong>
      <nav aria-label="Views">
        ${VIEWS.map(([name, title]) => html`
          <a href="#/${name}" aria-current=${name === view ? "page" : undefined}>${title}</a>`)}
      </nav>
      <${Conversations} chosen=${view === "chat" ? item : ""} />
      <div class="foot">
        <button name="key" title=${storedKey() ? "Requests are sent with an API key" : "Requests are sent without an API key"}
          onClick=${() => setAsked("The key is sent with every request, and kept until this tab is closed.")}>API key: ${storedKey() ? "set" : "none"}</button>
        <${Theme} />
        <span class="links"><button name="help" class="link" onClick=${() => setHelp(true)}>Help</button> <a href="docs" target="_blank">API</a> <${Version} /></span>
      </div>
    </aside>
    <main id="main" tabindex="-1" class=${view} key=${keyNumber}>
      ${view === "chat" && html`<${Chat} id=${item || ""} />`}
      ${view === "overview" && (item ? html`<${Engine} key=${item} name=${item} />` : html`<${Overview} />`)}
      ${view === "charts" && html`<${Charts} />`}
      ${view === "requests" && (item ? html`<${Timeline} key=${item} name=${item} />` : html`<${Requests} />`)}
    </main>
    ${asked && html`<${KeyDialog} message=${asked} done=${done} />`}
    ${help && html`<${Help} close=${() => setHelp(false)} />`}`;
}

function Version() {
  const [version, setVersion] = useState("");
  useEffect(() => { getJson("version").then((found) => setVersion(found.version), () => setVersion("")); }, []);
  return version && html`<span class="version">${version}</span>`;
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
