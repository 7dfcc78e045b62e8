// Formulas in Markdown: $…$, $$…$$, \(…\) and \[…\]. They are set in MathML by Temml, which is loaded for the first one.

const CLOSERS = { "\\(": "\\)", "\\[": "\\]", $$: "$$", $: "$" };
let loading = null;

// A plugin of markdown-it: formulas become elements with their TeX as text, which `typeset` replaces.
export function math(md) {
  md.inline.ruler.before("escape", "math", inline);
  md.block.ruler.before("fence", "math", block, { alt: ["paragraph", "reference", "blockquote", "list"] });
  md.renderer.rules.math = (tokens, index) => element("span", tokens[index], md);
  md.renderer.rules.math_block = (tokens, index) => element("p", tokens[index], md);
}

const element = (tag, { content, markup }, md) => `<${tag} class="math${markup === "block" ? " display" : ""}">${md.utils.escapeHtml(content)}</${tag}>`;

function inline(state, silent) {
  const { src, pos } = state;
  const opener = ["\\(", "\\[", "$$", "$"].find((one) => src.startsWith(one, pos));
  if (!opener) return false;
  const from = pos + opener.length;
  const end = src.indexOf(CLOSERS[opener], from);
  if (end <= from) return false;
  // As in Pandoc, a sum of money is no formula: "$5 and $6".
  if (opener === "$" && (/\s/.test(src[from]) || /\s/.test(src[end - 1]) || /\d/.test(src[end + 1] || ""))) return false;
  if (!silent) {
    const token = state.push("math", "math", 0);
    token.content = src.slice(from, end);
    token.markup = opener === "$$" || opener === "\\[" ? "block" : "";
  }
  state.pos = end + CLOSERS[opener].length;
  return true;
}

function block(state, startLine, endLine, silent) {
  const start = state.bMarks[startLine] + state.tShift[startLine];
  const opener = ["$$", "\\["].find((one) => state.src.startsWith(one, start));
  if (!opener) return false;
  const closer = CLOSERS[opener];
  let line = startLine, end = -1;
  for (let from = start + 2; line < endLine; line++, from = state.bMarks[line]) {
    end = state.src.slice(0, state.eMarks[line]).indexOf(closer, from);
    if (end >= 0) break;
  }
  // More text behind the formula: it is part of a paragraph.
  if (end < 0 || state.src.slice(end + 2, state.eMarks[line]).trim()) return false;
  if (silent) return true;
  const token = state.push("math_block", "math", 0);
  Object.assign(token, { content: state.src.slice(start + 2, end).trim(), markup: "block", block: true, map: [startLine, line + 1] });
  state.line = line + 1;
  return true;
}

const load = () => (loading ??= new Promise((resolve, reject) => {
  const script = Object.assign(document.createElement("script"), { src: new URL("../vendor/temml.js", import.meta.url).href });
  script.onload = () => resolve(globalThis.temml);
  script.onerror = () => reject(new Error("Temml cannot be loaded."));
  document.head.append(script);
}));

// Sets the formulas under an element. What is no TeX stays as it was written.
export function typeset(root) {
  const found = [...root.querySelectorAll(".math:not([data-set])")];
  if (!found.length) return;
  const set = (temml) => {
    for (const one of found) {
      const tex = one.textContent;
      one.dataset.set = "";
      try { temml.render(tex, one, { displayMode: one.classList.contains("display"), throwOnError: true }); } catch { one.textContent = tex; }
    }
  };
  // Once it is there, formulas are set before the next frame.
  if (globalThis.temml) set(globalThis.temml);
  else load().then(set, () => {});
}
