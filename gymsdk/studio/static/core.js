// What all pages share: rendering, the API, the address, and formatting.
import { h, render } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import htm from "htm";

export const html = htm.bind(h);
export { render, useCallback, useEffect, useMemo, useRef, useState };

// The token comes after `#` in the address that `gymsdk view` prints, so that no request and no log has it. It
// stays in this tab: a cookie would be sent to all ports of the host.

const TOKEN_KEY = "gymsdk-token";
let token = null;

export function takeToken(shown = "#/") {
  const found = /^#token=(.+)$/.exec(location.hash)?.[1];
  try {
    if (found) sessionStorage.setItem(TOKEN_KEY, found);
    token = found || sessionStorage.getItem(TOKEN_KEY);
  } catch {
    // Without storage, the token lasts until the page is loaded again.
    token = found || token;
  }
  if (found) history.replaceState(null, "", shown);
  return token !== null;
}

// The API. An exported page replaces `source` by one that reads its own files.

export class ApiError extends Error {}

const request = (path, { headers = {}, ...options } = {}) => fetch(`/api/${path}`, { ...options, headers: { ...headers, Authorization: `Bearer ${token}` } });

export const source = {
  live: true,
  async get(path, parameters = {}, signal = undefined) {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(parameters)) {
      if (value !== undefined && value !== null && value !== "") query.set(name, typeof value === "object" ? JSON.stringify(value) : value);
    }
    const text = query.toString();
    return readAnswer(await request(`${path}${text ? `?${text}` : ""}`, { signal }));
  },
  async post(path, body) {
    return readAnswer(await request(path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }));
  },
};

const RECONNECT_MS = 3000;

// Calls `receive` with the data of each event of a stream of server-sent events, and connects again when the stream ends.
// `EventSource` cannot send the token.
export async function followEvents(path, receive, signal) {
  let last = null;
  while (!signal.aborted) {
    try {
      const response = await request(path, { signal, headers: last === null ? {} : { "Last-Event-ID": last } });
      // The run or the token is unknown: another attempt gets the same answer. A proxy answers 5xx while the viewer restarts.
      if (!response.ok && response.status < 500) return;
      for await (const event of response.ok ? readEvents(response.body) : []) {
        last = event.id ?? last;
        if (event.data !== undefined) receive(JSON.parse(event.data));
      }
    } catch (error) {
      if (signal.aborted) return;
      if (!(error instanceof TypeError)) throw error; // fetch's error for a lost connection
    }
    await new Promise((resolve) => { setTimeout(resolve, RECONNECT_MS); });
  }
}

// Yields the fields of each event. Events end with an empty line, and our server writes a field on one line.
async function* readEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const events = (text + part.value).split("\n\n");
    text = events.pop();
    for (const event of events) yield Object.fromEntries(event.split("\n").filter((line) => !line.startsWith(":")).map((line) => line.split(/: (.*)/s, 2)));
  }
}

async function readAnswer(response) {
  const text = await response.text();
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    throw new ApiError(`${response.status} ${text.slice(0, 200)}`);
  }
  if (!response.ok) throw new ApiError(value.detail || `status ${response.status}`);
  return value;
}

// Returns [value, error, isLoading] of a request; the value of the last request stays until the next one has arrived.
export function useRequest(path, parameters = {}, version = 0) {
  const [state, setState] = useState({ value: null, error: null, path: null });
  const [isLoading, setLoading] = useState(false);
  const key = path === null ? null : JSON.stringify([path, parameters]);
  useEffect(() => {
    if (path === null) return undefined;
    const abort = new AbortController();
    setLoading(true);
    source.get(path, parameters, abort.signal).then(
      (value) => { setState({ value, error: null, path }); setLoading(false); },
      (error) => {
        if (error.name !== "AbortError") { setState({ value: null, error, path }); setLoading(false); }
      },
    );
    return () => abort.abort();
  }, [key, version]);
  const isCurrent = state.path === path;
  return [isCurrent ? state.value : null, isCurrent ? state.error : null, isLoading];
}

// The address: `#/path?name=value`. It holds the filter, the sorting and the selection, so that each view has a link.

export function parseAddress(hash = location.hash) {
  const [path, query = ""] = hash.replace(/^#/, "").split("?", 2);
  return { parts: path.split("/").filter(Boolean).map(decode), query: Object.fromEntries(new URLSearchParams(query)) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function buildAddress(parts, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const text = new URLSearchParams(given).toString();
  return `#/${parts.map((part) => encodeURIComponent(part).replaceAll("%3A", ":")).join("/")}${text ? `?${text}` : ""}`;
}

export function changeQuery(changes, { replace = true } = {}) {
  const { parts, query } = parseAddress();
  const address = buildAddress(parts, { ...query, ...changes });
  if (address === location.hash) return;
  if (replace) {
    history.replaceState(null, "", address);
    window.dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = address;
  }
}

export function useAddress() {
  const [address, setAddress] = useState(parseAddress);
  useEffect(() => {
    const update = () => setAddress(parseAddress());
    window.addEventListener("hashchange", update);
    return () => window.removeEventListener("hashchange", update);
  }, []);
  return address;
}

// Formatting

export const formatNumber = (value, digits = 3) =>
  value === null || value === undefined ? "" : Number.isInteger(value) ? value.toLocaleString("en-US") : Number(value.toFixed(digits)).toString();

export const formatCount = (number, noun) => `${formatNumber(number)} ${noun}${number === 1 ? "" : "s"}`;

export const formatReward = (value) => (value === null || value === undefined ? "–" : Number(value.toFixed(4)).toString());

export const formatSeconds = (value) =>
  value === null || value === undefined ? "" : value < 0.1 ? `${(value * 1000).toFixed(0)} ms` : value < 120 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${(value / 60).toFixed(1)} min`;

export function formatDate(value) {
  if (!value) return "";
  const date = new Date(typeof value === "number" ? value * 1000 : value);
  return Number.isNaN(date.getTime()) ? String(value) : date.toISOString().replace("T", " ").slice(0, 19);
}

export const describeReward = (row) => (row.reward === null || row.reward === undefined ? row.failure || row.outcome : formatReward(row.reward));

export const rolloutName = (row) => `${row.task}:${row.repeat}`;

// Text for a person who cannot see the colour: the band of a reward.
export const rewardBand = (reward) => (reward === null || reward === undefined ? "none" : reward <= 0 ? "zero" : reward < 1 ? "partial" : "full");

// Keys

export function useKeys(handlers, isActive = true) {
  const current = useRef(handlers);
  current.current = handlers;
  useEffect(() => {
    if (!isActive) return undefined;
    const listen = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const target = event.target;
      const isTyping = target instanceof HTMLElement && (target.matches("input, textarea, select") || target.isContentEditable);
      if (isTyping && event.key !== "Escape") return;
      const handler = current.current[event.key];
      if (handler) {
        event.preventDefault();
        handler(event);
      }
    };
    window.addEventListener("keydown", listen);
    return () => window.removeEventListener("keydown", listen);
  }, [isActive]);
}

export function Failure({ error }) {
  return error ? html`<div class="error" role="alert">${error.message}</div>` : null;
}

export function Loading() {
  return html`<div class="empty" role="status">Loading…</div>`;
}
