// One run: its summary, the table of rollouts with filters, the tasks, the tools and the failures.
import { Failure, Loading, buildAddress, changeQuery, formatCount, formatDate, formatNumber, formatReward, formatSeconds, html, rewardBand, rolloutName, source, useEffect, useKeys, useMemo, useRef, useRequest, useState } from "./core.js";
import { Histogram } from "./charts.js";
import { RolloutPane, useNotes } from "./rollout.js";
import { Grid, useRows } from "./table.js";

// Saved filters, each with the rule that it applies; the run's description has further ones.
export const LENSES = [
  { name: "not solved", rule: "rollouts with a reward below 1", where: [["reward", "<", 1]] },
  { name: "no reward", rule: "rollouts that failed", where: [["reward", "=", null]] },
  { name: "full reward without a tool", rule: "reward 1 or more and no tool call", where: [["reward", ">=", 1], ["tool_calls", "=", 0]] },
  { name: "ended by a budget", rule: "episodes that did not end by themselves", where: [["ended", "in", ["turns", "tools", "tokens", "deadline"]]] },
  { name: "grader time-out", rule: "the grader used up its own limit", where: [["figure:grader_timeout", "=", 1]] },
  { name: "longest", rule: "sorted by tokens, the highest first", where: [], sort: "tokens" },
];

export const COLUMNS = [
  { name: "task", title: "id", width: "w1", isSortable: true, show: rolloutName },
  { name: "reward", title: "reward", width: "w1", isNumber: true, isSortable: true, show: (row) => html`<span class=${rewardBand(row.reward) === "full" ? "good" : rewardBand(row.reward) === "partial" ? "warn" : "bad"}>${formatReward(row.reward)}</span>` },
  { name: "ended", title: "ended", width: "w2", isSortable: true, show: (row) => row.ended || row.failure || row.outcome },
  { name: "turns", title: "turns", width: "w0", isNumber: true, isSortable: true, show: (row) => row.turns },
  { name: "tool_calls", title: "tools", width: "w0", isNumber: true, isSortable: true, show: (row) => row.tool_calls },
  { name: "tokens", title: "tokens", width: "w1", isNumber: true, isSortable: true, show: (row) => formatNumber(row.tokens) },
  { name: "seconds", title: "time", width: "w1", isNumber: true, isSortable: true, show: (row) => formatSeconds(row.seconds) },
  { name: "answer", title: "answer", width: "w3", isSortable: true, show: (row) => row.answer ?? "" },
  { name: "prompt", title: "prompt", width: "w9", isSortable: true, show: (row) => row.prompt },
];

export function parseWhere(query) {
  try {
    const value = JSON.parse(query.where || "[]");
    return Array.isArray(value) ? value.filter((condition) => Array.isArray(condition) || typeof condition === "string") : [];
  } catch {
    return [];
  }
}

const writeWhere = (where) => changeQuery({ where: where.length ? JSON.stringify(where) : "" });
const sameCondition = (one, other) => JSON.stringify(one) === JSON.stringify(other);

function describeCondition(condition) {
  if (typeof condition === "string") return condition;
  const [field, operator, value] = condition;
  return `${String(field).replace(/^figure:/, "")} ${operator} ${Array.isArray(value) ? value.map(describeValue).join(", ") : describeValue(value)}`;
}

// The text `none` has quotes, and a missing value has none.
function describeValue(value) {
  if (value === null || value === "") return "none";
  if (typeof value === "number") return formatNumber(value, 4);
  return ["none", "null"].includes(value) ? `"${value}"` : value;
}

export function RunPage({ run, tab, query, version, state }) {
  const [info, error] = useRequest(`runs/${encodeURIComponent(run)}`, {}, version);
  if (error) return html`<${Failure} error=${error} />`;
  const tabs = [["rollouts", []], ["groups", ["groups"]], ["tools", ["tools"]], ["failures", ["failures"]]];
  const kept = { where: query.where, q: query.q };
  return html`
    ${info ? html`<${Summary} info=${info} state=${state} />` : html`<${Loading} />`}
    <nav class="tabs" aria-label="parts of the run">
      ${tabs.map(([name, parts]) => html`<a key=${name} href=${buildAddress(["run", run, ...parts], kept)} aria-current=${tab === name ? "page" : undefined}>${name}</a>`)}
    </nav>
    <${Toolbar} run=${run} query=${query} state=${state} info=${info} />
    ${tab === "rollouts" && html`<${Rollouts} run=${run} query=${query} version=${version} figures=${info?.figures || []} />`}
    ${tab === "groups" && html`<${Groups} run=${run} query=${query} version=${version} />`}
    ${tab === "tools" && html`<${Tools} run=${run} query=${query} version=${version} />`}
    ${tab === "failures" && html`<${Failures} run=${run} query=${query} version=${version} />`}`;
}

function Summary({ info, state }) {
  const summary = info.summary;
  const entries = [
    ["model", info.model || "unknown"],
    ["environments", info.environments.join(", ") || "unknown"],
    ["rollouts", `${formatNumber(state?.rollouts ?? summary.rollouts)}${info.asked ? ` of ${formatNumber(info.asked)}` : ""}${source.live && info.asked && !(state?.is_finished ?? info.is_finished) ? ", running" : ""}`],
    ["mean reward", summary.mean === null ? "–" : `${summary.mean.toFixed(3)}${summary.stderr === null ? "" : ` ± ${summary.stderr.toFixed(3)}`}`],
    ["tasks solved at least once", summary.tasks ? `${formatNumber(summary.solved_tasks)} of ${formatNumber(summary.tasks)}` : ""],
    ...info.accuracy.map(({ environment, name, value }) => [info.environments.length > 1 ? `${name}, ${environment}` : name, `${value.toFixed(1)} %`]),
    ["turns", formatNumber(summary.turns, 1)],
    ["tokens", summary.tokens === null ? "" : formatNumber(Math.round(summary.tokens))],
    ["time", formatSeconds(summary.seconds)],
    ["started", formatDate(info.started || summary.started)],
  ];
  return html`
    <dl class="summary">${entries.filter(([, value]) => value).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
    ${(info.length_components || []).map(({ name, r }) => html`<div key=${name} class="notice warn">The component <a href=${buildAddress(["run", info.run], { sort: `figure:${name}`, desc: "1" })}>${name.replace(/^part\//, "")}</a> rises with the number of tokens (r = ${r.toFixed(2)}): it may reward length itself.</div>`)}
    ${info.part && html`<div class="notice" role="status">${info.part}</div>`}
    ${(info.bad_files || []).map((bad) => html`<div class="notice warn">${bad.file}: ${bad.message}</div>`)}
    ${info.bad_lines.map((bad) => html`<div class="notice warn">${bad.file}: ${bad.count} lines cannot be read (${bad.message})</div>`)}`;
}

function Toolbar({ query, state, info }) {
  const lenses = [...LENSES, ...(info?.lenses || []).map(({ name, title, rule }) => ({ name: title, rule, where: [["lens", "=", name]] }))];
  const where = parseWhere(query);
  const [text, setText] = useState(query.q || "");
  const field = useRef(null);
  const [condition, setCondition] = useState("");
  const [problem, setProblem] = useState("");
  useEffect(() => setText(query.q || ""), [query.q]);
  useEffect(() => {
    const timer = setTimeout(() => text !== (query.q || "") && changeQuery({ q: text }), 250);
    return () => clearTimeout(timer);
  }, [text]);
  useKeys({ "/": () => field.current?.focus(), Escape: () => document.activeElement?.blur() });
  const add = async (event) => {
    event.preventDefault();
    const { condition: found, error } = await source.get("condition", { text: condition });
    setProblem(error || "");
    if (error) return;
    writeWhere([...where, found]);
    setCondition("");
  };
  return html`
    <div class="toolbar" role="search">
      <label class="visually-hidden" for="search">search the conversations</label>
      <input id="search" type="search" ref=${field} placeholder="search the conversations   /" value=${text} onInput=${(event) => setText(event.target.value)} />
      ${state && state.indexed < 1 && source.live && html`<span class="muted" role="status">texts indexed: ${Math.floor(state.indexed * 100)} %</span>`}
      <label class="visually-hidden" for="lens">saved filter</label>
      <select id="lens" value="" onChange=${(event) => { const lens = lenses[Number(event.target.value)]; if (lens) changeQuery({ where: lens.where.length ? JSON.stringify(lens.where) : "", sort: lens.sort, desc: lens.sort ? "1" : "", at: "" }); event.target.value = ""; }}>
        <option value="">saved filters</option>
        ${lenses.map((lens, number) => html`<option key=${lens.name} value=${number} title=${lens.rule}>${lens.name}: ${lens.rule}</option>`)}
      </select>
      <form onSubmit=${add}><label class="visually-hidden" for="condition">add a condition</label><input id="condition" class="mono" placeholder="turns>4" size="14" value=${condition} onInput=${(event) => setCondition(event.target.value)} title="a condition: reward<1, tool=get_weather, figure:calls_needed>2" /> <button type="submit">add</button></form>
      ${problem && html`<span class="bad" role="alert">${problem}</span>`}
      ${where.map((each, number) => html`<span key=${JSON.stringify(each)} class="chip">${describeCondition(each)}<button aria-label=${`remove ${describeCondition(each)}`} onClick=${() => writeWhere(where.filter((_, other) => other !== number))}>×</button></span>`)}
      ${(where.length > 0 || query.q) && html`<button onClick=${() => changeQuery({ where: "", q: "" })}>clear</button>`}
    </div>`;
}

function Facets({ run, query, version }) {
  const where = parseWhere(query);
  const [facets] = useRequest(`runs/${encodeURIComponent(run)}/facets`, { where, q: query.q }, version);
  if (!facets) return html`<aside class="side" aria-label="facets"></aside>`;
  const toggle = (condition) => writeWhere(where.some((each) => sameCondition(each, condition)) ? where.filter((each) => !sameCondition(each, condition)) : [...where, condition]);
  return html`
    <aside class="side" aria-label="facets">
      ${facets.reward.length > 0 && html`<h2>reward</h2><${Histogram} bins=${facets.reward} onChoose=${(bin) => writeWhere([...where.filter(([field]) => field !== "reward"), ["reward", ">=", bin.low], ["reward", bin === facets.reward.at(-1) ? "<=" : "<", bin.high]])} />`}
      ${["environment", "outcome", "ended", "failure", "tool"].map((name) => facets[name].length > 0 && html`
        <h2 key=${name}>${name}</h2>
        ${facets[name].map(({ value, count }) => html`<button key=${value} class="facet" aria-pressed=${where.some((each) => sameCondition(each, [name, "=", value]))} onClick=${() => toggle([name, "=", value])}><span>${value}</span><span class="muted">${formatNumber(count)}</span></button>`)}`)}
      ${facets.fields.map(({ name, values }) => html`
        <h2 key=${name} title="number of rollouts, and their mean reward">${name}</h2>
        ${values.map(({ value, count, mean }) => html`<button key=${value} class="facet" aria-pressed=${where.some((each) => sameCondition(each, [name, "=", value]))} onClick=${() => toggle([name, "=", value])}><span>${value}</span><span class="muted">${formatNumber(count)}${mean !== null && ` · ${mean.toFixed(3)}`}</span></button>`)}`)}
    </aside>`;
}

// The columns to show: those of the address, or all but the figures.
function chooseColumns(query, tagged) {
  const known = [...COLUMNS.slice(0, -1), ...(tagged.size ? [{ name: "tags", title: "tags", width: "w2", show: (row) => (tagged.get(rolloutName(row)) || []).map((tag) => html`<span class="tag">${tag}</span>`) }] : []), COLUMNS.at(-1)];
  const names = query.columns ? query.columns.split(",") : known.map((column) => column.name);
  const figures = names.filter((name) => name.startsWith("figure:")).map((name) => buildFigureColumn(name.slice("figure:".length)));
  return [...known.slice(0, -1).filter((column) => names.includes(column.name)), ...figures, ...known.slice(-1).filter((column) => names.includes(column.name))];
}

const buildFigureColumn = (name) => ({ name: `figure:${name}`, title: name.replace(/^part\//, ""), width: "w2", isNumber: true, isSortable: true, show: (row) => formatNumber(row.figures?.[name], 4) });

function ColumnChooser({ query, figures }) {
  const shown = query.columns ? query.columns.split(",") : COLUMNS.map((column) => column.name);
  const all = [...COLUMNS.map(({ name, title }) => [name, title]), ...figures.map((name) => [`figure:${name}`, name.replace(/^part\//, "component ")])];
  const toggle = (name) => {
    const next = all.map(([each]) => each).filter((each) => (each === name ? !shown.includes(each) : shown.includes(each)));
    if (next.length) changeQuery({ columns: next.length === COLUMNS.length && COLUMNS.every((column) => next.includes(column.name)) ? "" : next.join(",") });
  };
  return html`<details class="chooser"><summary>columns</summary><fieldset><legend class="visually-hidden">columns of the table</legend>
    ${all.map(([name, title]) => html`<label key=${name}><input type="checkbox" checked=${shown.includes(name)} onChange=${() => toggle(name)} /> ${title}</label>`)}</fieldset></details>`;
}

function Rollouts({ run, query, version, figures }) {
  const where = parseWhere(query);
  const sort = query.sort || "id", descending = query.desc === "1";
  const chosenFigures = (query.columns || "").split(",").filter((name) => name.startsWith("figure:")).map((name) => name.slice("figure:".length));
  const parameters = { where, q: query.q, sort, desc: descending ? "1" : "", figures: chosenFigures.length ? chosenFigures : "" };
  const [shownVersion, setShownVersion] = useState(version);
  const rows = useRows(run, parameters, shownVersion);
  const [notes, reloadNotes] = useNotes(run, version);
  const [counted] = useRequest(version === shownVersion ? null : `runs/${encodeURIComponent(run)}/rows`, { ...parameters, limit: 1 }, version);
  const fresh = counted ? counted.total - rows.total : 0;
  const selected = query.at === undefined ? null : Number(query.at);
  const [width, setWidth] = useState(50);
  const select = (number, row) => changeQuery({ at: number, id: rolloutName(row), item: "" });
  const move = (step) => {
    const next = Math.max(0, Math.min(rows.total - 1, selected === null ? 0 : selected + step));
    const row = rows.getRow(next);
    if (row) select(next, row);
    else rows.load(rows.pageOf(next));
  };
  const moveRepeat = (step) => {
    const current = selected === null ? null : rows.getRow(selected);
    if (current) changeQuery({ id: `${current.task}:${Math.max(0, current.repeat + step)}`, item: "" });
  };
  useKeys({
    j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1),
    l: () => moveRepeat(1), h: () => moveRepeat(-1),
    Enter: () => query.id && (location.hash = buildAddress(["run", run, query.id])),
    d: () => query.id && (location.hash = buildAddress(["diff", `${run}:${query.id.split(":")[0]}:0`, `${run}:${query.id}`])),
    Escape: () => changeQuery({ at: "", id: "", item: "" }),
  });
  const drag = (event) => {
    const box = event.currentTarget.parentElement.getBoundingClientRect();
    const follow = (move) => setWidth(Math.max(20, Math.min(80, ((box.right - move.clientX) / box.width) * 100)));
    const stop = () => { window.removeEventListener("pointermove", follow); window.removeEventListener("pointerup", stop); };
    window.addEventListener("pointermove", follow);
    window.addEventListener("pointerup", stop);
  };
  const tagged = useMemo(() => {
    const found = new Map();
    for (const note of notes) found.set(note.id, [...(found.get(note.id) || []), ...note.tags]);
    return found;
  }, [notes]);
  const columns = useMemo(() => chooseColumns(query, tagged), [tagged, query.columns]);
  return html`
    ${fresh > 0 && html`<div class="notice" role="status">${formatCount(fresh, "new rollout")} <button onClick=${() => setShownVersion(version)}>show them</button></div>`}
    <div class="split">
      <${Facets} run=${run} query=${query} version=${shownVersion} />
      <div class="list" style=${query.id ? { flexBasis: `${100 - width}%` } : {}}>
        <div class="list-head"><p class="muted" role="status">${rows.isLoaded ? formatCount(rows.total, "rollout") : "…"}${rows.isCut ? ": the search stops here, write more words" : ""}</p><${ColumnChooser} query=${query} figures=${figures} /></div>
        <${Failure} error=${rows.error} />
        <${Grid} rows=${rows} columns=${columns} selected=${selected} onSelect=${select} sort=${sort} descending=${descending} label="rollouts"
          onSort=${(name) => changeQuery(sort !== name ? { sort: name, desc: "", at: "" } : descending ? { sort: "", desc: "", at: "" } : { desc: "1", at: "" })} />
      </div>
      ${query.id && html`
        <div class="divider" role="separator" aria-orientation="vertical" aria-label="width of the rollout" aria-valuemin="20" aria-valuemax="80" aria-valuenow=${Math.round(width)} tabindex="0" onPointerDown=${drag}
          onKeyDown=${(event) => { const step = { ArrowLeft: 5, ArrowRight: -5 }[event.key]; if (step) { event.preventDefault(); setWidth(Math.max(20, Math.min(80, width + step))); } }}></div>
        <section class="pane" aria-label="rollout" tabindex="0" style=${{ flexBasis: `${width}%` }}>
          <${RolloutPane} key=${query.id} run=${run} id=${query.id} query=${query} notes=${notes} reloadNotes=${reloadNotes} version=${version} />
        </section>`}
    </div>`;
}

function Strip({ run, rollouts }) {
  return html`<span class="strip">${rollouts.slice(0, 64).map((each) => {
    const band = rewardBand(each.reward);
    const mark = { full: "●", partial: "◐", zero: "○", none: "×" }[band];
    return html`<a key=${each.id} href=${buildAddress(["run", run, each.name])} class=${{ full: "good", partial: "warn" }[band] || "bad"} title=${`repeat ${each.repeat}: ${formatReward(each.reward)}`} aria-label=${`repeat ${each.repeat}: ${formatReward(each.reward)}`}>${mark}</a>`;
  })}${rollouts.length > 64 ? " …" : ""}</span>`;
}

function Groups({ run, query, version }) {
  const where = parseWhere(query);
  const [from, setFrom] = useState(0);
  const [answer, error] = useRequest(`runs/${encodeURIComponent(run)}/tasks`, { where, q: query.q, offset: from, limit: 200 }, version);
  if (error) return html`<${Failure} error=${error} />`;
  if (!answer) return html`<${Loading} />`;
  return html`
    <div class="page">
      <p class="muted">${formatNumber(answer.total)} tasks, the hardest first. A task whose rewards are all alike teaches a group-based trainer nothing.</p>
      <table class="plain"><thead><tr><th>task</th><th class="num">n</th><th class="num">mean</th><th class="num">spread</th><th>repeats</th><th>rewards</th><th>prompt</th></tr></thead>
        <tbody>${answer.tasks.map((group) => html`
          <tr key=${`${group.environment} ${group.task}`}>
            <td><a href=${buildAddress(["run", run], { where: JSON.stringify([["task", "=", group.task]]) })}>${group.environment} ${group.task}</a></td>
            <td class="num">${group.scored}</td><td class="num">${group.mean === null ? "–" : group.mean.toFixed(3)}</td><td class="num">${group.spread === null ? "–" : group.spread.toFixed(3)}</td>
            <td><${Strip} run=${run} rollouts=${group.rollouts.map((each) => ({ ...each, name: `${group.task}:${each.repeat}` }))} /></td>
            <td>${group.scored > 1 && group.spread === 0 ? html`<span class="muted">all alike</span>` : ""}</td><td>${group.prompt}</td>
          </tr>`)}</tbody></table>
      ${answer.total > 200 && html`<p><button disabled=${from === 0} onClick=${() => setFrom(from - 200)}>earlier</button> ${from + 1} to ${Math.min(answer.total, from + 200)} <button disabled=${from + 200 >= answer.total} onClick=${() => setFrom(from + 200)}>later</button></p>`}
    </div>`;
}

function Tools({ run, query, version }) {
  const [tools, error] = useRequest(`runs/${encodeURIComponent(run)}/tools`, { where: parseWhere(query), q: query.q }, version);
  if (error) return html`<${Failure} error=${error} />`;
  if (!tools) return html`<${Loading} />`;
  if (!tools.length) return html`<div class="empty">No rollout calls a tool.</div>`;
  return html`
    <div class="page"><table class="plain"><thead><tr><th>tool</th><th class="num">calls</th><th class="num">rollouts</th><th class="num">errors</th><th class="num">mean reward with</th><th class="num">without</th></tr></thead>
      <tbody>${tools.map((tool) => html`
        <tr key=${tool.tool}><td><a href=${buildAddress(["run", run], { where: JSON.stringify([["tool", "=", tool.tool]]) })}>${tool.tool}</a></td>
          <td class="num">${formatNumber(tool.calls)}</td><td class="num">${formatNumber(tool.rollouts)}</td>
          <td class="num">${tool.errors ? html`<a href=${buildAddress(["run", run], { where: JSON.stringify([["tool_error", "=", tool.tool]]) })}>${formatNumber(tool.errors)}</a>` : "0"}</td>
          <td class="num">${tool.mean_with === null ? "–" : tool.mean_with.toFixed(3)}</td><td class="num">${tool.mean_without === null ? "–" : tool.mean_without.toFixed(3)}</td></tr>`)}</tbody></table></div>`;
}

function Failures({ run, query, version }) {
  const [failures, error] = useRequest(`runs/${encodeURIComponent(run)}/failures`, { where: parseWhere(query), q: query.q }, version);
  if (error) return html`<${Failure} error=${error} />`;
  if (!failures) return html`<${Loading} />`;
  if (!failures.length) return html`<div class="empty">Every rollout has a reward.</div>`;
  return html`
    <div class="page"><table class="plain"><thead><tr><th>kind</th><th>stage</th><th class="num">rollouts</th><th>one of the messages</th></tr></thead>
      <tbody>${failures.map((failure) => html`
        <tr key=${`${failure.kind} ${failure.stage}`}><td><a href=${buildAddress(["run", run], { where: JSON.stringify([["failure", "=", failure.kind], ["stage", "=", failure.stage]]) })}>${failure.kind}</a></td>
          <td>${failure.stage}</td><td class="num">${formatNumber(failure.count)}</td><td>${failure.message}</td></tr>`)}</tbody></table></div>`;
}
