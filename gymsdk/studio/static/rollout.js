// One rollout: its result, the conversation, the times, the tokens and the stored line.
import { Failure, Loading, buildAddress, changeQuery, describeReward, formatCount, formatNumber, formatSeconds, html, rewardBand, rolloutName, source, useEffect, useKeys, useMemo, useRequest, useState } from "./core.js";
import { Waterfall } from "./charts.js";
import { BranchDialog, ReplayButton } from "./play.js";
import { Item, arrangeItems, getText, isPolicyItem, useItems } from "./transcript.js";

export function useNotes(run, version) {
  const [own, setOwn] = useState(0);
  const [notes] = useRequest(`runs/${encodeURIComponent(run)}/notes`, {}, `${version} ${own}`);
  return [notes || [], () => setOwn((number) => number + 1)];
}

export function RolloutPane({ run, id, query, notes, reloadNotes, version, isPage }) {
  const [answer, error] = useRequest(`runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(id)}`);
  const { items, total, load, error: itemsError, isLoading } = useItems(run, id, answer);
  const [isRaw, setRaw] = useState(false);
  const [view, setView] = useState("conversation");
  const [editing, setEditing] = useState(null);
  const [branching, setBranching] = useState(null);
  const arranged = useMemo(() => arrangeItems(items), [items.length, answer]);
  const current = query.item === undefined ? null : Number(query.item);
  const move = (step) => {
    const at = arranged.findIndex(({ index }) => index === current);
    const next = arranged[Math.max(0, Math.min(arranged.length - 1, at < 0 ? (step > 0 ? 0 : arranged.length - 1) : at + step))];
    if (next) changeQuery({ item: next.index });
  };
  useKeys({
    n: () => move(1),
    p: () => move(-1),
    r: () => setRaw((value) => !value),
    t: () => source.live && setEditing({ item: null }),
    c: () => navigator.clipboard?.writeText(location.href),
    Escape: () => { setEditing(null); setBranching(null); },
  });
  useEffect(() => {
    if (current !== null) document.getElementById(`item-${current}`)?.scrollIntoView({ block: "center" });
  }, [current, answer]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!answer) return html`<${Loading} />`;
  const { row, line, figures, verdict } = answer;
  const own = notes.filter((note) => note.id === rolloutName(row));
  const hasTokens = items.some((item) => item.generation_token_ids?.length);
  const parts = Object.entries(line.reward_components || {});
  const [stepRewards, calls] = ["step_rewards", "environment_calls"].map((name) => getList(line.gymsdk?.[name]));
  const tabs = ["conversation", ...(hasTokens ? ["tokens"] : []), ...(calls.length ? ["judges"] : []), "times", "json"];
  return html`
    <div>
      <div class="page" style=${{ paddingBottom: 0 }}>
        <h2><a href=${buildAddress(["run", run, rolloutName(row)])}>${row.environment} ${rolloutName(row)}</a></h2>
        <p style=${{ margin: "4px 0" }}>
          <span class=${`reward ${rewardBand(row.reward) === "full" ? "good" : rewardBand(row.reward) === "partial" ? "warn" : "bad"}`}>${describeReward(row)}</span>
          ${parts.length > 0 && html` <span class="muted">= ${parts.map(([name, value]) => `${name} ${formatNumber(value)}`).join(" + ")}</span>`}
          ${stepRewards.length > 0 && html` <span class="muted">(steps: ${stepRewards.map((value) => String(value)).join(", ")})</span>`}
        </p>
        <p class="muted" style=${{ margin: "2px 0" }}>
          ${[row.ended && `ended: ${row.ended}`, formatCount(row.turns, "turn"), formatCount(row.tool_calls, "tool call"), row.tokens && formatCount(row.tokens, "token"), row.seconds !== null && formatSeconds(row.seconds), line.gymsdk?.seed !== undefined && `seed ${line.gymsdk.seed}`].filter(Boolean).join(" · ")}
        </p>
        ${row.message && html`<p class="bad">${row.failure} at ${row.stage}: ${row.message}</p>`}
        <p style=${{ margin: "4px 0" }}>${own.filter((note) => note.item === null).map((note) => html`${note.tags.map((tag) => html`<span class="tag">${tag}</span>`)}${note.text && html`<span>${note.text}</span>`}`)}
          ${source.live && html`<button onClick=${() => setEditing({ item: null })}>note <kbd>t</kbd></button>`}
          ${answer.can_play && html` <${ReplayButton} run=${run} id=${rolloutName(row)} />`}</p>
        <details open=${isPage}><summary class="muted">verdict</summary>
          <dl class="verdict">${verdict.filter((name) => line[name] !== undefined).map((name) => html`<dt>${name}</dt><dd class="mono">${JSON.stringify(line[name])}</dd>`)}</dl>
        </details>
      </div>
      <div class="toolbar" role="group" aria-label="views of the rollout">
        ${tabs.map((name) => html`<button key=${name} aria-pressed=${view === name} onClick=${() => setView(name)}>${name}</button>`)}
        <button onClick=${() => setRaw(!isRaw)} aria-pressed=${isRaw}>raw <kbd>r</kbd></button>
      </div>
      ${editing && html`<${NoteDialog} run=${run} id=${rolloutName(row)} item=${editing.item} notes=${own} onClose=${(saved) => { setEditing(null); if (saved) reloadNotes(); }} />`}
      ${branching !== null && html`<${BranchDialog} run=${run} id=${rolloutName(row)} items=${items} opening=${answer.opening} item=${branching} onClose=${() => setBranching(null)} />`}
      ${view === "json" && html`<pre class="json page" tabindex="0" role="region" aria-label="stored line">${JSON.stringify({ ...line, figures }, null, 2)}</pre>`}
      ${view === "judges" && html`<${Calls} calls=${calls} leftOut=${line.gymsdk.environment_calls_left_out} />`}
      ${view === "times" && html`<div class="page">${line.gymsdk?.timing?.turns?.length ? html`<${Waterfall} timing=${line.gymsdk.timing} />` : html`<p class="muted">This rollout has no times of its turns.</p>`}</div>`}
      ${(view === "conversation" || view === "tokens") && html`
        <div class="transcript">
          ${arranged.map(({ item, index, output }) => html`<${Item} key=${index} item=${item} index=${index} output=${output} isRaw=${isRaw} isTokens=${view === "tokens"} isWhole=${items.length === total} isCurrent=${index === current}
            notes=${own.filter((note) => note.item === index)} link=${buildAddress(["run", run, rolloutName(row)], { item: index })} onNote=${source.live ? (number) => setEditing({ item: number }) : null}
            onBranch=${answer.can_play && index >= answer.opening && isPolicyItem(item) ? setBranching : null} tokensPath=${answer.has_tokenizer ? `runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(id)}/tokens` : null} />`)}
          ${items.length < total && html`<p><button disabled=${isLoading} onClick=${load}>show more: ${items.length} of ${total} items</button></p>`}
          <${Failure} error=${itemsError} />
        </div>`}
    </div>`;
}

// Another program may have written anything.
const getList = (value) => (Array.isArray(value) ? value.filter((member) => member !== null) : []);

// The calls of judges and user models, with the last message of each request; the view "json" has all of them.
function Calls({ calls, leftOut }) {
  return html`
    <div class="page">
      ${leftOut > 0 && html`<p class="muted">${formatCount(leftOut, "earlier call")} left out</p>`}
      ${calls.map(({ role, stage, step, seconds, request, answer, error }, number) => {
        const input = request?.input;
        const asked = typeof input === "string" ? input : getText(getList(input).at(-1)?.content);
        const answered = getList(answer?.output).map((item) => getText(item.content)).join(" ");
        return html`<details key=${number} open><summary><b>${String(role)}</b> ${`at ${stage}${step === undefined ? "" : ` ${step}`}, ${seconds} s`}</summary>
          <pre tabindex="0" role="region" aria-label=${`request ${number + 1}`}>${asked}</pre>
          <pre tabindex="0" role="region" aria-label=${`answer ${number + 1}`} class=${error ? "bad" : ""}>${error ? String(error.message) : answered}</pre></details>`;
      })}
    </div>`;
}

function NoteDialog({ run, id, item, notes, onClose }) {
  const known = notes.find((note) => note.item === item);
  const [tags, setTags] = useState(known ? known.tags.join(", ") : "");
  const [text, setText] = useState(known ? known.text : "");
  const [error, setError] = useState(null);
  const save = (event) => {
    event.preventDefault();
    const words = tags.split(",").map((tag) => tag.trim()).filter(Boolean);
    source.post(`runs/${encodeURIComponent(run)}/notes`, { id, item, tags: words, text }).then(() => onClose(true), setError);
  };
  return html`
    <div class="dialog" onClick=${(event) => event.target === event.currentTarget && onClose(false)}>
      <div role="dialog" aria-modal="true" aria-label="note">
        <form onSubmit=${save}>
          <h2>Note on ${id}${item === null ? "" : `, item ${item}`}</h2>
          <p><label>tags, separated by commas<br /><input style=${{ width: "100%" }} value=${tags} onInput=${(event) => setTags(event.target.value)} ref=${(element) => element && !element.dataset.seen && ((element.dataset.seen = "1"), element.focus())} /></label></p>
          <p><label>text<br /><textarea style=${{ width: "100%" }} rows="4" value=${text} onInput=${(event) => setText(event.target.value)}></textarea></label></p>
          <${Failure} error=${error} />
          <p><button class="primary" type="submit">save</button> <button type="button" onClick=${() => onClose(false)}>cancel</button></p>
        </form>
      </div>
    </div>`;
}

export function RolloutPage({ run, id, query, version }) {
  const [notes, reloadNotes] = useNotes(run, version);
  const task = id.split(":")[0];
  const [siblings] = useRequest(`runs/${encodeURIComponent(run)}/rows`, { where: [["task", "=", Number(task) || 0]], sort: "repeat", limit: 200 }, version);
  const rows = siblings ? siblings.rows : [];
  const at = rows.findIndex((row) => rolloutName(row) === id);
  const go = (step) => {
    const next = rows[at + step];
    if (next) location.hash = buildAddress(["run", run, rolloutName(next)]);
  };
  useKeys({ l: () => go(1), h: () => go(-1) });
  return html`
    <div>
      ${rows.length > 1 && html`<nav class="page" aria-label="repeats of the task" style=${{ paddingBottom: 0 }}>repeats of task ${task}:
        ${rows.map((row) => html` <a key=${row.id} href=${buildAddress(["run", run, rolloutName(row)])} aria-current=${rolloutName(row) === id ? "page" : undefined}>repeat ${row.repeat} (${describeReward(row)})</a>`)}
        ${at > 0 && html` <a href=${buildAddress(["diff", `${run}:${rolloutName(rows[0])}`, `${run}:${id}`])}>compare with the first</a>`}
      </nav>`}
      <${RolloutPane} run=${run} id=${id} query=${query} notes=${notes} reloadNotes=${reloadNotes} version=${version} isPage=${true} />
    </div>`;
}
