// The conversation of a rollout: messages, reasoning, and tool calls with their results beneath them.
import { Failure, html, source, useEffect, useRequest, useState } from "./core.js";
import { Markdown } from "./markdown.js";

const OPEN_CHARS = 1200;
const TOKEN_WINDOW = 2000;

export function getText(content) {
  if (typeof content === "string") return content;
  return Array.isArray(content) ? content.map((part) => (part && typeof part.text === "string" ? part.text : "")).join("") : "";
}

function getImages(content) {
  if (!Array.isArray(content)) return [];
  return content.filter((part) => part && part.type === "input_image").map((part) => (typeof part.image_url === "string" ? part.image_url : part.image_url?.url || ""));
}

export function kindOf(item) {
  return item.type || "message";
}

export function roleOf(item) {
  const kind = kindOf(item);
  if (kind === "function_call" || kind === "reasoning") return "assistant";
  if (kind === "function_call_output") return "tool";
  return item.role === "developer" ? "system" : item.role || "assistant";
}

export function isPolicyItem(item) {
  return kindOf(item) === "reasoning" || kindOf(item) === "function_call" || (kindOf(item) === "message" && item.role === "assistant");
}

export function formatArguments(text) {
  const value = parseExactly(String(text ?? ""));
  if (value === undefined || Array.isArray(value)) return String(text ?? "");
  return Object.entries(value).map(([name, each]) => `${name}=${JSON.stringify(each)}`).join(", ");
}

export const isToolError = (text) => /^(\{"error"|error:|Error:)/.test(text);

const pretty = (value) => JSON.stringify(value, null, 2);

// Returns the object in a JSON text, undefined if there is none, or if it would be shown with other numbers or texts.
function parseExactly(text) {
  try {
    const value = JSON.parse(text);
    const compact = text.replace(/"(?:[^"\\]|\\.)*"|\s+/g, (found) => (found[0] === '"' ? found : ""));
    return value && typeof value === "object" && JSON.stringify(value) === compact ? value : undefined;
  } catch {
    // A policy or a tool may write anything.
    return undefined;
  }
}

function prettyText(text) {
  const value = parseExactly(text);
  return value === undefined ? text : pretty(value);
}

function Foldable({ title, text, open, name, children }) {
  const isShort = text.length <= OPEN_CHARS;
  return html`<details open=${open ?? isShort}><summary class="muted">${title}${isShort ? "" : ` (${text.length.toLocaleString("en-US")} characters)`}</summary>${children || html`<pre tabindex="0" role="region" aria-label=${name}>${text}</pre>`}</details>`;
}

function Images({ content }) {
  return getImages(content).map((url, number) =>
    /^data:image\/(png|jpeg|gif|webp);base64,/i.test(url)
      ? html`<p key=${number}><img src=${url} alt=${`image ${number + 1} of the message`} style=${{ maxWidth: "100%" }} /></p>`
      : html`<p key=${number} class="muted">[remote image, not loaded: <span class="mono">${url.slice(0, 200)}</span>]</p>`);
}

function Result({ output, index, isWhole }) {
  if (!output) return html`<div class="result muted">${isWhole ? "no output" : "the output is not loaded yet"}</div>`;
  const text = getText(output.output);
  const failed = isToolError(text);
  return html`<div class=${`result ${failed ? "failed" : ""}`}>
    <${Foldable} title=${failed ? "result: error" : "result"} text=${prettyText(text)} name=${`result of item ${index}`} />
    <${Images} content=${output.output} />
  </div>`;
}

function Tokens({ item, index, path }) {
  const ids = item.generation_token_ids || [], scores = item.generation_log_probs || [];
  const [from, setFrom] = useState(0);
  const [texts, error] = useRequest(path, { item: index, from, n: TOKEN_WINDOW });
  const band = (score) => (score === undefined || score > -0.7 ? "" : score > -2.3 ? "t1" : score > -4.6 ? "t2" : "t3");
  return html`<div>
    <${Failure} error=${error} />
    <p class="muted">${ids.length.toLocaleString("en-US")} ${path ? "tokens" : "token ids"}; a shaded token was less likely than 50 %, 10 % or 1 %. Its title has the log-probability.</p>
    <div class="tokens">${ids.slice(from, from + TOKEN_WINDOW).map((id, number) => html`<span key=${number} class=${band(scores[from + number])} title=${[path ? `id ${id}` : "", scores[from + number] === undefined ? "" : `log-probability ${scores[from + number].toFixed(4)}`].filter(Boolean).join(", ")}>${path ? texts?.[number] ?? "" : `${id} `}</span>`)}</div>
    ${ids.length > TOKEN_WINDOW && html`<p>
      <button disabled=${from === 0} onClick=${() => setFrom(from - TOKEN_WINDOW)}>earlier</button> ${from + 1} to ${Math.min(ids.length, from + TOKEN_WINDOW)} <button disabled=${from + TOKEN_WINDOW >= ids.length} onClick=${() => setFrom(from + TOKEN_WINDOW)}>later</button>
    </p>`}
  </div>`;
}

export function Item({ item, index, output, isRaw, isCurrent, notes, link, onNote, onBranch, isTokens, isWhole, tokensPath }) {
  const kind = kindOf(item), role = roleOf(item);
  const [isOwnRaw, setOwnRaw] = useState(false);
  const hasTokens = Array.isArray(item.generation_token_ids) && item.generation_token_ids.length > 0;
  let title = role, body;
  if (isRaw || isOwnRaw) {
    body = html`<pre class="json" tabindex="0" role="region" aria-label=${`JSON of item ${index}`}>${pretty(item)}${output ? `\n${pretty(output)}` : ""}</pre>`;
  } else if (isTokens && hasTokens) {
    body = html`<${Tokens} item=${item} index=${index} path=${tokensPath} />`;
  } else if (kind === "function_call") {
    title = "tool call";
    body = html`<div><code class="mono"><b>${item.name}</b>(${formatArguments(item.arguments)})</code><${Result} output=${output} index=${index} isWhole=${isWhole} /></div>`;
  } else if (kind === "function_call_output") {
    title = "tool output without a call";
    body = html`<${Result} output=${item} index=${index} />`;
  } else if (kind === "reasoning") {
    title = "reasoning";
    const text = getText(item.content) || getText(item.summary);
    body = html`<${Foldable} title="reasoning" text=${text} open=${false} name=${`reasoning of item ${index}`} />`;
  } else {
    body = html`<div><${Markdown} text=${getText(item.content)} /><${Images} content=${item.content} /></div>`;
  }
  return html`
    <div role="group" id=${`item-${index}`} class=${`item ${role} ${isCurrent ? "current" : ""}`} aria-label=${`item ${index}: ${title}`}>
      <header><b>${title}</b><span>${index}</span>${hasTokens && html`<span>${item.generation_token_ids.length} tokens</span>`}
        ${(notes || []).map((note) => html`<span class="tag" title=${note.text}>${note.tags.join(", ") || "note"}</span>`)}
        <span class="grow"></span>
        <button onClick=${() => setOwnRaw(!isOwnRaw)} aria-pressed=${isOwnRaw}>${isOwnRaw ? "rendered" : "raw"}</button>
        ${onNote && html`<button onClick=${() => onNote(index)}>note</button>`}
        ${onBranch && html`<button onClick=${() => onBranch(index)}>branch</button>`}
        ${link && html`<a href=${link} aria-label=${`link to item ${index}`}>#</a>`}
      </header>
      <div class="body">${body}</div>
    </div>`;
}

// Pairs the outputs of tools with their calls, as `pair_outputs` in types.py does: engines repeat the ids of calls.
function pairOutputs(items) {
  const pairs = new Map();
  const openCalls = new Map(); // by id, the open calls of each turn that has some
  let turn = 0;
  let wasPolicy = false;
  items.forEach((item, index) => {
    const isPolicy = isPolicyItem(item);
    turn += isPolicy && !wasPolicy ? 1 : 0;
    wasPolicy = isPolicy;
    const id = String(item.call_id ?? "");
    const turns = openCalls.get(id) || [];
    if (kindOf(item) === "function_call") {
      if (turns.at(-1)?.turn !== turn) turns.push({ turn, calls: [] });
      turns.at(-1).calls.push(index);
      openCalls.set(id, turns);
    } else if (kindOf(item) === "function_call_output" && turns.length) {
      pairs.set(turns.at(-1).calls.shift(), index);
      if (!turns.at(-1).calls.length) turns.pop();
    }
  });
  return pairs;
}

// Returns the items to show, each with its index, and a call with its output; an output has no place of its own then.
export function arrangeItems(items) {
  const pairs = pairOutputs(items);
  const shown = new Set(pairs.values());
  return items
    .map((item, index) => ({ item, index, output: items[pairs.get(index)] }))
    .filter(({ index }) => !shown.has(index));
}

// The items of a rollout; a long transcript is read in parts.
export function useItems(run, id, answer) {
  const [more, setMore] = useState({ key: null, items: [], error: null, isLoading: false });
  const key = `${run} ${id}`;
  useEffect(() => setMore({ key, items: [], error: null, isLoading: false }), [key, answer]);
  const loaded = more.key === key ? more.items : [];
  const items = answer ? [...answer.items, ...loaded] : [];
  const total = answer ? answer.total_items : 0;
  const load = () => {
    setMore((state) => ({ ...state, key, isLoading: true }));
    source.get(`runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(id)}/items`, { from: items.length }).then(
      (next) => setMore((state) => ({ key, items: [...(state.key === key ? state.items : []), ...next.items], error: null, isLoading: false })),
      (error) => setMore((state) => ({ ...state, error, isLoading: false })),
    );
  };
  return { items, total, load, error: more.error, isLoading: more.isLoading };
}
