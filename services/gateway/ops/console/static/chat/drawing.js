// Draws a growing text: what is complete is drawn once, and only its end again, so that the whole costs time in proportion
// to its length. Complete are all blocks but the last one, and all parts of a long last one but its last part: an item of
// a list, a row of a table, a line of code.

// At least this long between two drawings: this many times as long as the last one took.
const SHARE = 6;
// A block up to this length is drawn as a whole.
const LONG_CHARS = 1500;

// The blocks that can be continued, by the type of their first token: what the text of the next parts is read after, the
// element that holds the parts, and the lines at which parts begin.
const KINDS = {
  fence: {
    prefix: (lines) => `${lines[0]}\n`,
    inside: "code",
    parts: (block) => Array.from({ length: block[0].content.split("\n").length - 1 }, (_, index) => block[0].map[0] + 1 + index),
    // Highlighting needs all of the code: until then the lines are plain. Each piece is a box, so that new ones move no old one.
    nodes: ([root]) => [Object.assign(document.createElement("span"), { className: "piece", textContent: root.querySelector("code").textContent })],
  },
  table_open: {
    prefix: (lines) => `${lines[0]}\n${lines[1]}\n`,
    inside: null,
    // The head stays, with the widths that its columns have now.
    begin: holdColumns,
    parts: (block) => block.filter(({ type, map }) => type === "tr_open" && map[0] > block[0].map[0]).map(({ map }) => map[0]),
    // Rows that come together are a table of their own: a browser looks at all rows of a table again for each new one.
    nodes: ([root], widths) => (root.querySelector("tbody") ? [piece(root.querySelector("tbody"), widths)] : []),
  },
};
for (const type of ["bullet_list_open", "ordered_list_open"]) {
  KINDS[type] = {
    prefix: () => "",
    inside: null,
    parts: (block) => block.filter((one) => one.type === "list_item_open" && one.level === 1).map(({ map }) => map[0]),
    nodes: ([root]) => [...root.children],
  };
}

export class Drawing {
  // language: {parse, nodes}, see `markdown.js`.
  constructor(root, language) { Object.assign(this, { root, language, timer: 0, next: 0 }); this.clear(); }

  clear() {
    // fixed: characters that are drawn for good; end: the nodes after them; open: the block that they are a part of.
    Object.assign(this, { drawn: "", fixed: 0, end: [], open: null, wasOpen: false, env: {} });
    this.root.replaceChildren();
  }

  // isDone: no more text follows.
  update(text, isDone) {
    this.text = text;
    if (isDone) { this.stop(); this.finish(); }
    else this.timer ||= setTimeout(() => { this.timer = 0; this.draw(); }, Math.max(0, this.next - performance.now()));
  }

  stop() { clearTimeout(this.timer); this.timer = 0; }

  finish() {
    // What was drawn in parts is drawn once more as a whole: highlighted, and with the spaces of a list that is not tight.
    if (this.wasOpen || !this.text.startsWith(this.drawn)) this.clear();
    this.replaceEnd(this.root, this.nodes(this.parse(this.text.slice(this.fixed))));
    this.drawn = this.text;
    this.fixed = this.text.length;
    this.end = [];
  }

  draw() {
    const began = performance.now();
    if (!this.text.startsWith(this.drawn)) this.clear();
    this.drawn = this.text;
    if (this.open) this.drawOpen();
    if (!this.open) this.drawBlocks();
    const now = performance.now();
    this.next = now + SHARE * (now - began);
  }

  parse(text) { return this.language.parse(text, this.env); }
  nodes(tokens) { return this.language.nodes(tokens, this.env); }

  replaceEnd(parent, nodes) {
    for (const one of this.end) one.remove();
    parent.append(...nodes);
    this.end = nodes;
  }

  drawBlocks() {
    const rest = this.text.slice(this.fixed);
    const tokens = this.parse(rest);
    const last = blocks(tokens).at(-1) ?? 0;
    if (last > 0) {
      this.replaceEnd(this.root, this.nodes(tokens.slice(0, last)));
      this.end = [];
      this.fixed += offset(rest, tokens[last].map[0]);
    }
    const block = tokens.slice(last);
    this.replaceEnd(this.root, this.nodes(block));
    if (this.text.length - this.fixed > LONG_CHARS && KINDS[block[0]?.type]) this.begin(block);
  }

  // Goes on with the last block part by part.
  begin(block) {
    const kind = KINDS[block[0].type];
    const found = this.end.find((one) => one.nodeType === Node.ELEMENT_NODE);
    const rest = this.text.slice(this.fixed);
    this.open = { type: block[0].type, kind, prefix: kind.prefix(rest.split("\n", 2)), into: (kind.inside ? found.querySelector(kind.inside) : found) };
    if (!this.open.into || kind.parts(block).length < 2) { this.open = null; return; }
    this.wasOpen = true;
    if (kind.begin) this.open.kept = kind.begin(this.open.into);
    else this.open.into.replaceChildren();
    this.end = [];
    this.fixed += this.open.prefix.length;
    this.drawOpen();
  }

  drawOpen() {
    const { type, kind, prefix, into, kept } = this.open;
    const rest = prefix + this.text.slice(this.fixed);
    const tokens = this.parse(rest);
    const [first, second] = blocks(tokens);
    const isSame = tokens[first]?.type === type;
    const block = isSame ? tokens.slice(first, second) : [];
    const isOver = !isSame || second !== undefined;
    const from = isOver ? undefined : kind.parts(block).at(-1);
    // The parts before the last one, or all of them, are drawn for good.
    const fixed = isOver ? (isSame ? offset(rest, tokens[second].map[0]) : prefix.length) : offset(rest, from ?? 0);
    if (fixed > prefix.length || isOver) {
      const done = isSame ? this.parse(rest.slice(0, fixed)) : [];
      this.replaceEnd(into, done.length ? kind.nodes(this.elements(done), kept) : []);
      this.end = [];
      this.fixed += Math.max(0, fixed - prefix.length);
    }
    if (isOver) { this.open = null; return; }
    const left = this.parse(prefix + this.text.slice(this.fixed));
    this.replaceEnd(into, left.length ? kind.nodes(this.elements(left), kept) : []);
  }

  elements(tokens) { return this.nodes(tokens).filter((one) => one.nodeType === Node.ELEMENT_NODE); }
}

// The indices of the tokens that begin a block of the first level.
const blocks = (tokens) => tokens.flatMap((one, index) => (one.level === 0 && one.nesting >= 0 && one.map ? [index] : []));

// Leaves the head of a table, and returns the widths of its columns.
function holdColumns(root) {
  const widths = [...root.querySelectorAll("th")].map((one) => one.getBoundingClientRect().width);
  root.querySelector("tbody").remove();
  fix(root.querySelector("table"), widths);
  return widths;
}

// Rows of a table as a table with these columns.
function piece(rows, widths) {
  const table = Object.assign(document.createElement("table"), { className: "piece" });
  table.append(rows);
  return fix(table, widths);
}

function fix(table, widths) {
  table.style.tableLayout = "fixed";
  table.style.width = `${widths.reduce((sum, one) => sum + one, 0)}px`;
  const columns = widths.map((width) => {
    const one = document.createElement("col");
    one.style.width = `${width}px`;
    return one;
  });
  const group = document.createElement("colgroup");
  group.append(...columns);
  table.prepend(group);
  return table;
}

// Where a line begins.
function offset(text, line) {
  let at = 0;
  for (let count = 0; count < line; count++) at = text.indexOf("\n", at) + 1;
  return at;
}
