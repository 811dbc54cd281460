"use strict";

/* What a model writes, as Markdown. HTML in it is shown as text; what marked makes of the rest goes
   through DOMPurify, the only maker of HTML that the page's policy permits. Pictures become links,
   for loading one would tell its server what the model was told to put into its address. */

const escaped = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "\u2611 " : "\u2610 "),
    heading({ tokens, depth }) {
      const level = Math.min(depth + 2, 6); // below those of the page
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});

DOMPurify.addHook("uponSanitizeAttribute", (_, given) => {
  if (given.attrName === "class") given.keepAttr = given.attrValue.startsWith("language-");
});
DOMPurify.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName !== "A") return;
  element.target = "_blank";
  element.rel = "noopener noreferrer nofollow";
});

const PERMITTED = {
  ALLOWED_TAGS: (
    "a blockquote br code del em h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul"
  ).split(" "),
  ALLOWED_ATTR: ["align", "class", "href", "rel", "start", "target", "title"],
  ALLOWED_URI_REGEXP: /^(https?|mailto):/i,
  ALLOW_ARIA_ATTR: false,
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** A code block with its language and a button that copies it. */
function codeBlock(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "";
  const figure = make("div", "code-block");
  const head = make("div", "code-head");
  head.append(make("span", "", language), copyButton("Copy", () => code.textContent.replace(/\n$/, "")));
  pre.replaceWith(figure);
  pre.tabIndex = 0; // for keys to scroll it
  figure.append(head, pre);
}

function htmlOf(block) {
  const made = make("div", "block");
  made.append(DOMPurify.sanitize(marked.parser([block]), PERMITTED));
  for (const pre of made.querySelectorAll("pre")) codeBlock(pre);
  for (const table of made.querySelectorAll("table")) {
    const frame = make("div", "table");
    frame.tabIndex = 0;
    table.replaceWith(frame);
    frame.append(table);
  }
  return made;
}

/** Text that is rendered while it grows; blocks that are whole stay as they are. */
class Markdown {
  constructor(element) {
    this.element = element;
    this.text = "";
    this.sources = []; // of the blocks that are shown
    this.timer = null;
    this.seconds = 0; // that the last rendering took
  }

  write(text) {
    if (!text) return;
    this.text += text;
    // A long answer is rendered less often, so that the page stays responsive.
    this.timer ??= setTimeout(() => this.render(), Math.max(30, 4000 * this.seconds));
  }

  render() {
    clearTimeout(this.timer);
    this.timer = null;
    const begin = performance.now();
    try {
      this.renderBlocks();
    } catch { // nested deeper than the stack
      this.element.replaceChildren(make("pre", "", this.text));
      this.sources = [];
    }
    this.seconds = (performance.now() - begin) / 1000;
  }

  renderBlocks() {
    const tokens = marked.lexer(this.text);
    const blocks = tokens.filter(({ type }) => type !== "space" && type !== "def");
    const links = Object.keys(tokens.links).join(); // which blocks above them may refer to
    blocks.forEach((block, i) => {
      const source = `${links}\n${block.raw}`;
      if (this.sources[i] === source) return;
      const made = htmlOf(block);
      if (i < this.element.children.length) this.element.children[i].replaceWith(made);
      else this.element.append(made);
      this.sources[i] = source;
    });
    this.sources.length = blocks.length;
    while (this.element.children.length > blocks.length) this.element.lastChild.remove();
  }
}
