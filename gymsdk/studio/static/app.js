// The viewer of runs: chooses the page for the address, follows a growing run, and handles the keys of every page.
import { buildAddress, followEvents, html, render, source, takeToken, useAddress, useEffect, useKeys, useState } from "./core.js";
import { ComparePage, DiffPage } from "./compare.js";
import { RolloutPage } from "./rollout.js";
import { RunPage } from "./run.js";
import { RunsPage } from "./runs.js";

const KEYS = [
  ["j k", "next, previous rollout"],
  ["h l", "previous, next repeat of the task"],
  ["Enter", "open the rollout on its own page"],
  ["n p", "next, previous item of the conversation"],
  ["/", "search"],
  ["d", "compare with the first repeat"],
  ["t", "write a note"],
  ["r", "raw JSON"],
  ["c", "copy the link"],
  ["Escape", "close"],
  ["?", "this list"],
];

// Follows a run while its page is visible; returns its state, and a number that changes with it.
function useEvents(run) {
  const [state, setState] = useState(null);
  useEffect(() => {
    setState(null);
    if (!run || !source.live) return undefined;
    let stream = null;
    const open = () => {
      if (document.hidden || stream) return;
      stream = new AbortController();
      followEvents(`events?run=${encodeURIComponent(run)}`, setState, stream.signal);
    };
    const close = () => { stream?.abort(); stream = null; };
    const update = () => (document.hidden ? close() : open());
    document.addEventListener("visibilitychange", update);
    open();
    return () => { document.removeEventListener("visibilitychange", update); close(); };
  }, [run]);
  return [state, state && state.run === run ? state.generation : 0];
}

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("gymsdk-theme", theme);
  } catch {
    // A page from disk may have no storage.
  }
}

function readTheme() {
  let stored = null;
  try {
    stored = localStorage.getItem("gymsdk-theme");
  } catch {
    // See chooseTheme.
  }
  return stored || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
}

function App() {
  const { parts, query } = useAddress();
  const [page, ...rest] = parts;
  const run = page === "run" && hasToken ? rest[0] : null;
  const [state, version] = useEvents(run);
  const [theme, setTheme] = useState(readTheme);
  const [showsKeys, setShowsKeys] = useState(false);
  useEffect(() => chooseTheme(theme), [theme]);
  useEffect(() => { document.title = parts.length ? `${parts.slice(1).join(" ") || page} · gymsdk` : "gymsdk view"; }, [parts.join("/")]);
  useKeys({ "?": () => setShowsKeys(true), Escape: () => setShowsKeys(false) }, true);
  let body;
  if (!hasToken) body = html`<div class="empty">This tab has no token. In this tab, open the address that <code>gymsdk view</code> printed.</div>`;
  else if (!page) body = html`<${RunsPage} />`;
  else if (page === "run" && rest.length === 1) body = html`<${RunPage} key=${run} run=${run} tab="rollouts" query=${query} version=${version} state=${state} />`;
  else if (page === "run" && ["groups", "tools", "failures"].includes(rest[1])) body = html`<${RunPage} key=${run} run=${run} tab=${rest[1]} query=${query} version=${version} state=${state} />`;
  else if (page === "run" && rest.length === 2) body = html`<${RolloutPage} key=${`${run} ${rest[1]}`} run=${run} id=${rest[1]} query=${query} version=${version} />`;
  else if (page === "compare" && rest.length === 2) body = html`<${ComparePage} key=${rest.join(" ")} a=${rest[0]} b=${rest[1]} query=${query} />`;
  else if (page === "diff" && rest.length === 2) body = html`<${DiffPage} key=${rest.join(" ")} a=${rest[0]} b=${rest[1]} />`;
  else body = html`<div class="empty">There is no such page. <a href="#/">All runs</a></div>`;
  return html`
    <header class="header">
      <a class="crumb" href="#/">gymsdk</a>
      ${run && html`<a class="crumb" href=${buildAddress(["run", run])}>${run}</a>`}
      ${page && page !== "run" && html`<span class="crumb">${page}</span>`}
      <span class="grow"></span>
      <button onClick=${() => setTheme(theme === "dark" ? "light" : "dark")}>${theme === "dark" ? "light" : "dark"}</button>
      <button aria-label="keys" onClick=${() => setShowsKeys(true)}>?</button>
    </header>
    <main class="main"><h1 class="visually-hidden">${parts.length ? parts.join(" ") : "runs"}</h1>${body}</main>
    ${showsKeys && html`
      <div class="dialog" onClick=${() => setShowsKeys(false)}>
        <div role="dialog" aria-modal="true" aria-label="keys"><h2>Keys</h2>
          <div class="keys">${KEYS.map(([keys, meaning]) => html`<span key=${keys}>${keys.split(" ").map((key) => html`<kbd>${key}</kbd> `)}</span><span>${meaning}</span>`)}</div>
          <button onClick=${() => setShowsKeys(false)}>close</button></div>
      </div>`}`;
}

const hasToken = !source.live || takeToken();
// The address of a viewer that was started again, entered in this tab, changes only the part after `#`.
window.addEventListener("hashchange", (event) => {
  if (!location.hash.startsWith("#token=")) return;
  takeToken(new URL(event.oldURL).hash || "#/");
  location.reload();
});

document.documentElement.dataset.theme = readTheme();
render(html`<${App} />`, document.getElementById("app"));
