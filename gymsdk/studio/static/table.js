// A table of rollouts that renders only the rows on the screen, and asks for them in pages.
import { formatNumber, html, source, useCallback, useEffect, useRef, useState } from "./core.js";

const ROW = 28;
const PAGE = 200;
// Chromium does not lay out higher elements; further rows are on further pages.
const MAX_ROWS = 500_000;

// Keeps pages of rows; asks for those that are visible.
export function useRows(run, parameters, version) {
  const key = JSON.stringify([run, parameters]);
  const [, redraw] = useState(0);
  const store = useRef({ key: null, pages: new Map(), total: 0, error: null, loaded: false });
  if (store.current.key !== key) {
    store.current = { key, pages: new Map(), total: store.current.total, error: null, loaded: false };
  }
  const load = useCallback((page) => {
    const current = store.current;
    if (current.pages.has(page)) return;
    current.pages.set(page, null);
    source.get(`runs/${encodeURIComponent(run)}/rows`, { ...parameters, offset: page * PAGE, limit: PAGE }).then(
      (answer) => {
        if (store.current !== current) return;
        current.pages.set(page, answer.rows);
        Object.assign(current, { total: answer.total, isCut: answer.is_cut, loaded: true, error: null });
        redraw((number) => number + 1);
      },
      (error) => {
        if (store.current !== current) return;
        Object.assign(current, { error, loaded: true, total: 0 });
        redraw((number) => number + 1);
      },
    );
  }, [key]);
  useEffect(() => {
    if (version) {
      store.current = { ...store.current, pages: new Map() };
    }
    load(0);
  }, [key, version]);
  const getRow = (number) => store.current.pages.get(Math.floor(number / PAGE))?.[number % PAGE] ?? null;
  return { total: store.current.total, error: store.current.error, isCut: store.current.isCut, isLoaded: store.current.loaded, getRow, load, pageOf: (number) => Math.floor(number / PAGE) };
}

export function Grid({ rows, columns, selected, onSelect, sort, descending, onSort, label }) {
  const box = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const measure = useCallback(() => {
    if (box.current) setView({ top: box.current.scrollTop, height: box.current.clientHeight });
  }, []);
  useEffect(() => {
    measure();
    const observer = new ResizeObserver(measure);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  const [start, setStart] = useState(0);
  const count = Math.max(0, Math.min(rows.total - start, MAX_ROWS));
  const first = Math.max(0, Math.floor(view.top / ROW) - 8);
  const last = Math.min(count, first + Math.ceil(view.height / ROW) + 16);
  useEffect(() => {
    if (start >= rows.total) setStart(0);
  }, [rows.total]);
  useEffect(() => {
    for (let page = rows.pageOf(start + first); page <= rows.pageOf(start + Math.max(first, last - 1)); page++) rows.load(page);
  }, [start, first, last, rows]);
  useEffect(() => {
    if (selected === null || !box.current) return;
    const page = Math.floor(selected / MAX_ROWS) * MAX_ROWS;
    if (page !== start && selected < rows.total) setStart(page);
    const top = (selected - page) * ROW;
    const { scrollTop, clientHeight } = box.current;
    if (top < scrollTop) box.current.scrollTop = top;
    else if (top + 2 * ROW > scrollTop + clientHeight) box.current.scrollTop = top + 2 * ROW - clientHeight;
  }, [selected]);
  const turn = (step) => {
    setStart(start + step);
    box.current.scrollTop = 0;
  };
  const visible = [];
  for (let number = start + first; number < start + last; number++) visible.push(number);
  return html`
    ${rows.total > MAX_ROWS && html`<nav class="pages" aria-label="parts of the table">
      <button disabled=${start === 0} onClick=${() => turn(-MAX_ROWS)}>earlier</button> ${formatNumber(start + 1)} to ${formatNumber(start + count)} <button disabled=${start + count >= rows.total} onClick=${() => turn(MAX_ROWS)}>later</button>
    </nav>`}
    <div class="grid" role="grid" aria-label=${label} aria-rowcount=${rows.total + 1} tabindex="0" ref=${box} onScroll=${measure}>
      <div class="grid-head" role="row" aria-rowindex="1">
        ${columns.map((column) => html`
          <div key=${column.name} role="columnheader" class=${`${column.width} ${column.isNumber ? "num" : ""}`} aria-sort=${sort === column.name ? (descending ? "descending" : "ascending") : "none"}>
            <button class=${column.width} tabindex="-1" disabled=${!column.isSortable} onClick=${() => onSort(column.name)}>
              ${column.title}${sort === column.name ? (descending ? " ↓" : " ↑") : ""}
            </button>
          </div>`)}
      </div>
      <div style=${{ height: `${count * ROW}px`, position: "relative" }} role="presentation">
        <div style=${{ position: "absolute", top: `${first * ROW}px`, left: 0, right: 0 }} role="presentation">
          ${visible.map((number) => {
            const row = rows.getRow(number);
            return html`
              <div key=${number} class="grid-row" role="row" aria-rowindex=${number + 2} aria-selected=${number === selected} onClick=${() => row && onSelect(number, row)}>
                ${columns.map((column) => html`<div key=${column.name} role="gridcell" class=${`cell ${column.width} ${column.isNumber ? "num" : ""}`}>${row ? column.show(row) : ""}</div>`)}
              </div>`;
          })}
        </div>
      </div>
    </div>`;
}
