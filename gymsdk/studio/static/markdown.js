// Renders text that a model or an environment wrote. Such text is hostile: it may contain scripts, forms and remote
// images. Markdown becomes HTML only through DOMPurify, and mathematics only through KaTeX without its trusted commands.
import { Marked } from "marked";
import "./vendor/purify.min.js";
import { html, useEffect, useRef, useState } from "./core.js";

const MAX_CHARS = 100_000;
const DISPLAY = [/^\$\$([\s\S]+?)\$\$/, /^\\\[([\s\S]+?)\\\]/];
const INLINE = [/^\$(?!\s)((?:\\.|[^\\$\n])+?)(?<!\s)\$(?![\d\w])/, /^\\\(([\s\S]+?)\\\)/];

// Answers of maths tasks are often written without the marks of mathematics.
function matchBoxed(text) {
  if (!text.startsWith("\\boxed{")) return null;
  let depth = 0;
  for (let at = 6; at < Math.min(text.length, 2000); at++) {
    if (text[at] === "\\") at++;
    else if (text[at] === "{") depth++;
    else if (text[at] === "}" && --depth === 0) return [text.slice(0, at + 1), text.slice(0, at + 1)];
  }
  return null;
}

const purify = window.DOMPurify;

const HTML_RULES = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "i", "img", "li", "ol", "p", "pre", "s", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "src", "alt", "title", "align", "start", "data-math"],
  ALLOWED_URI_REGEXP: /^(?:https?:|data:image\/(?:png|jpeg|gif|webp);base64,)/i,
  ADD_URI_SAFE_ATTR: ["alt", "title", "align", "start", "data-math"],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};
const MATH_RULES = { USE_PROFILES: { mathMl: true }, FORBID_ATTR: ["style", "href", "src"], RETURN_DOM_FRAGMENT: true };

function createMarked(formulas) {
  const keep = (text, display) => `<span data-math="${formulas.push({ text, display }) - 1}"></span>`;
  const extension = (name, level, patterns, display) => ({
    name,
    level,
    start: (text) => {
      const found = text.search(display ? /\$\$|\\\[/ : /\$|\\\(|\\boxed\{/);
      return found < 0 ? undefined : found;
    },
    tokenizer: (text) => {
      for (const pattern of patterns) {
        const found = pattern.exec(text);
        if (found) return { type: name, raw: found[0], text: found[1] };
      }
      const boxed = display ? null : matchBoxed(text);
      return boxed ? { type: name, raw: boxed[0], text: boxed[1] } : undefined;
    },
    renderer: (token) => keep(token.text, display),
  });
  return new Marked({
    gfm: true,
    breaks: true,
    async: false,
    extensions: undefined,
  }, {
    extensions: [
      extension("mathBlock", "block", DISPLAY, true),
      extension("mathDisplay", "inline", DISPLAY, true),
      extension("mathInline", "inline", INLINE, false),
    ],
    // HTML, entities and definitions in the text are shown as they are written: the tags of a policy are no HTML.
    tokenizer: { html: () => undefined, tag: () => undefined, def: () => undefined, autolink: () => undefined },
    renderer: {
      html: (token) => escapeHtml(token.text),
      text(token) {
        return token.tokens ? this.parser.parseInline(token.tokens) : escapeHtml(token.text);
      },
    },
  });
}

const escapeHtml = (text) => text.replace(/[&<>"']/g, (each) => `&#${each.charCodeAt(0)};`);

let katexLoading = null;

function loadKatex() {
  katexLoading ??= import("./vendor/katex.min.js").then(() => window.katex);
  return katexLoading;
}

export function renderMarkdown(text) {
  const formulas = [];
  const fragment = purify.sanitize(createMarked(formulas).parse(text), HTML_RULES);
  for (const link of fragment.querySelectorAll("a")) {
    link.setAttribute("target", "_blank");
    link.setAttribute("rel", "noopener noreferrer nofollow");
  }
  for (const image of fragment.querySelectorAll("img")) {
    // Remote images would tell their servers who reads the transcript.
    if (!/^data:/i.test(image.getAttribute("src") || "")) image.replaceWith(`[image: ${image.getAttribute("alt") || "remote"}]`);
  }
  return { fragment, formulas };
}

async function renderFormulas(element, formulas) {
  const katex = await loadKatex();
  for (const span of element.querySelectorAll("span[data-math]")) {
    const formula = formulas[Number(span.dataset.math)];
    if (!formula) continue;
    try {
      const markup = katex.renderToString(formula.text, { output: "mathml", displayMode: formula.display, trust: false, maxExpand: 100, maxSize: 20, throwOnError: true, strict: "ignore" });
      span.replaceChildren(purify.sanitize(markup, MATH_RULES));
    } catch {
      span.textContent = formula.text;
    }
  }
}

export function Markdown({ text }) {
  const box = useRef(null);
  const [isWhole, setWhole] = useState(false);
  const isCut = text.length > MAX_CHARS && !isWhole;
  useEffect(() => {
    const { fragment, formulas } = renderMarkdown(isCut ? text.slice(0, MAX_CHARS) : text);
    box.current.replaceChildren(fragment);
    if (formulas.length) renderFormulas(box.current, formulas);
  }, [text, isCut]);
  return html`<div><div class="markdown" ref=${box}></div>${isCut && html`<button onClick=${() => setWhole(true)}>show all ${text.length.toLocaleString("en-US")} characters</button>`}</div>`;
}
