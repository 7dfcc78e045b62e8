// Markdown as safe HTML: the renderer escapes all text, code is highlighted, formulas are set, other hosts are not asked.

import MarkdownIt from "../vendor/markdown-it.js";
import hljs from "../vendor/highlight.js";
import { html, useLayoutEffect, useRef } from "../vendor/preact.js";
import { Drawing } from "./drawing.js";
import { math, typeset } from "./math.js";

const HIGHLIGHT_CHARS = 40_000;

const md = new MarkdownIt({ html: false, linkify: true }).use(math);
const { rules } = md.renderer;
const escape = md.utils.escapeHtml;
const original = (name) => rules[name] || ((tokens, index, options, env, self) => self.renderToken(tokens, index, options));

rules.fence = (tokens, index) => code(tokens[index].content, tokens[index].info.trim().split(/\s+/)[0]);
rules.code_block = (tokens, index) => code(tokens[index].content, "");
// The page asks no other host for anything: an image elsewhere becomes a link.
rules.image = (tokens, index) => {
  const { content: alt } = tokens[index], src = tokens[index].attrGet("src");
  if (src.startsWith("data:image/")) return `<img src="${escape(src)}" alt="${escape(alt)}">`;
  return `<a href="${escape(src)}" target="_blank" rel="noopener noreferrer">${escape(alt || src)}</a>`;
};
const link = original("link_open");
rules.link_open = (tokens, index, ...rest) => {
  tokens[index].attrSet("target", "_blank");
  tokens[index].attrSet("rel", "noopener noreferrer");
  return link(tokens, index, ...rest);
};
rules.table_open = () => '<div class="table" tabindex="0" role="region" aria-label="Table"><table>';
rules.table_close = () => "</table></div>";
for (const name of ["th_open", "td_open"]) {
  const cell = original(name);
  // The page's security policy allows no styles in attributes.
  rules[name] = (tokens, index, ...rest) => {
    const side = /right|center/.exec(tokens[index].attrGet("style") || "");
    tokens[index].attrs = side ? [["class", side[0]]] : [];
    return cell(tokens, index, ...rest);
  };
}

const highlighted = (text, language) => (language && text.length < HIGHLIGHT_CHARS && hljs.getLanguage(language)
  ? hljs.highlight(text, { language, ignoreIllegals: true }).value : escape(text));

function code(text, language) {
  const inside = highlighted(text, language);
  return `<div class="code"><div class="code-head"><span>${escape(language)}</span><button type="button" name="copy-code">Copy</button></div>`
    + `<pre tabindex="0"><code class="hljs">${inside}</code></pre></div>`;
}

// What a drawing needs of a language: `parse` gives tokens with the lines of each block, `nodes` the elements of tokens.
export const language = {
  parse: (text, env) => md.parse(text, env),
  nodes(tokens, env) {
    const made = document.createElement("div");
    made.innerHTML = md.renderer.render(tokens, md.options, env);
    typeset(made);
    return [...made.childNodes];
  },
};

export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Without TLS browsers have no clipboard for pages of other machines.
  const field = Object.assign(document.createElement("textarea"), { value: text });
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

const onClick = ({ target }) => {
  if (target.name !== "copy-code") return;
  copy(target.closest(".code").querySelector("code").textContent).then(() => {
    target.textContent = "Copied";
    setTimeout(() => { target.textContent = "Copy"; }, 1500);
  });
};

export function Markdown({ text, isDone }) {
  const box = useRef(null);
  const drawing = useRef(null);
  // Layout effects: a message is never seen, or measured for scrolling, without its words.
  useLayoutEffect(() => {
    drawing.current = new Drawing(box.current, language);
    return () => drawing.current.stop();
  }, []);
  useLayoutEffect(() => { drawing.current.update(text, isDone); }, [text, isDone]);
  return html`<div class="markdown" ref=${box} onClick=${onClick}></div>`;
}
