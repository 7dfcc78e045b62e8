// What the keys do, and where more is written.

import { html, useEffect, useRef } from "./vendor/preact.js";

const KEYS = [
  ["Enter", "sends the message"], ["Shift+Enter", "begins a new line"], ["Escape", "stops the answer, closes a drawer"],
  ["↑ in an empty field", "edits your last message"], ["Ctrl+Shift+O", "begins a new conversation"], ["Ctrl+K", "searches the conversations"],
  ["Ctrl+,", "opens and closes the settings"], ["Tab, then arrow keys", "go along the tokens of an answer"],
];

export function Help({ close }) {
  const dialog = useRef(null);
  useEffect(() => {
    const shown = dialog.current;
    shown.showModal();
    return () => shown.close();
  }, []);
  return html`<dialog ref=${dialog} class="help" aria-labelledby="help-title" onCancel=${close}>
    <h1 id="help-title">Help</h1>
    <h2>Keys in the chat</h2>
    <dl>${KEYS.map(([key, does]) => html`<dt><kbd>${key}</kbd></dt><dd>${does}</dd>`)}</dl>
    <h2>More</h2>
    <ul>
      <li><a href="docs" target="_blank">The API of this server</a>, also as <a href="openapi.json" target="_blank">openapi.json</a>.</li>
      <li>Everything stays on this server and in this browser: conversations are kept in the browser's own database, and this page asks no other host for anything.</li>
      <li>In a terminal: <code>antiphon help</code>, <code>antiphon chat</code>, <code>antiphon top</code>.</li>
    </ul>
    <p class="bar"><button onClick=${close}>Close</button></p>
  </dialog>`;
}
