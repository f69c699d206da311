// Two runs side by side, and two transcripts side by side.
import { Failure, Loading, buildAddress, changeQuery, describeReward, formatReward, html, useMemo, useRequest } from "./core.js";
import { Scatter } from "./charts.js";
import { formatArguments, getText, kindOf, roleOf } from "./transcript.js";
import "./vendor/diff.min.js";

const signed = (value) => (value === null ? "" : `${value >= 0 ? "+" : "−"}${Math.abs(value).toFixed(3)}`);
const SHOWN = 200;

export function ComparePage({ a, b, query }) {
  const [comparison, error] = useRequest("compare", { a, b });
  if (error) return html`<${Failure} error=${error} />`;
  if (!comparison) return html`<${Loading} />`;
  const { overall, environments, pairs, warnings } = comparison;
  const choice = query.show || (pairs.some((pair) => pair.difference < 0) ? "lost" : "won");
  const shown = pairs.filter((pair) => (choice === "lost" ? pair.difference < 0 : choice === "won" ? pair.difference > 0 : choice === "down" ? pair.flip < 0 : choice === "up" ? pair.flip > 0 : true));
  if (choice === "won" || choice === "up") shown.reverse();
  const link = (pair) => buildAddress(["diff", `${a}:${pair.shown_a}`, `${b}:${pair.shown_b}`]);
  return html`
    <div class="page">
      <h2>A: <a href=${buildAddress(["run", a])}>${comparison.a}</a>, B: <a href=${buildAddress(["run", b])}>${comparison.b}</a></h2>
      ${warnings.map((warning) => html`<p class="warn" role="status">${warning}</p>`)}
      ${!overall ? html`<div class="empty">The runs have no task in common.</div>` : html`
        <table class="plain"><thead><tr><th>environment</th><th class="num">tasks</th><th class="num">A</th><th class="num">B</th><th class="num">B − A</th><th>95 % interval</th><th class="num">better</th><th class="num">worse</th><th class="num">flips up</th><th class="num">flips down</th></tr></thead>
          <tbody>${[...environments, overall].map((each) => html`
            <tr key=${each.environment}><td>${each.environment || "all"}</td><td class="num">${each.tasks}</td><td class="num">${each.a.toFixed(3)}</td><td class="num">${each.b.toFixed(3)}</td>
              <td class="num"><b>${signed(each.difference)}</b></td><td>${each.low === null ? "" : `${signed(each.low)} to ${signed(each.high)}`}${each.low > 0 || each.high < 0 ? " (excludes 0)" : ""}</td>
              <td class="num good">${each.better}</td><td class="num bad">${each.worse}</td><td class="num">${each.flips_up}</td><td class="num">${each.flips_down}</td></tr>`)}</tbody></table>
        <p class="muted">A task flips if its mean reward crosses 0.5. ${comparison.only_a} tasks are only in A, ${comparison.only_b} only in B.</p>
        <div style=${{ display: "flex", gap: "24px", flexWrap: "wrap" }}>
          <${Scatter} pairs=${pairs} a=${comparison.a} b=${comparison.b} onChoose=${(pair) => (location.hash = link(pair))} />
          <div style=${{ flex: 1, minWidth: "320px" }}>
            <div class="toolbar" role="group" aria-label="tasks to list">${[["lost", "B lost"], ["won", "B won"], ["down", "flips down"], ["up", "flips up"], ["all", "all"]].map(([name, title]) => html`<button key=${name} aria-pressed=${choice === name} onClick=${() => changeQuery({ show: name })}>${title}</button>`)}<span class="muted">${shown.length} tasks${shown.length > SHOWN ? `, the first ${SHOWN}` : ""}</span></div>
            ${shown.length ? html`<table class="plain"><thead><tr><th>task</th><th class="num">A</th><th class="num">B</th><th class="num">B − A</th><th>prompt</th></tr></thead>
              <tbody>${shown.slice(0, SHOWN).map((pair) => html`<tr key=${`${pair.environment} ${pair.task_a}`}><td><a href=${link(pair)}>${pair.environment} ${pair.task_a}</a></td><td class="num">${formatReward(pair.a)}</td><td class="num">${formatReward(pair.b)}</td><td class="num">${signed(pair.difference)}</td><td>${pair.prompt}</td></tr>`)}</tbody></table>` : html`<div class="empty">No such task.</div>`}
          </div>
        </div>`}
    </div>`;
}

function splitName(name) {
  const found = /^(.*):(\d+:\d+)$/.exec(name);
  return found ? [found[1], found[2]] : [name, "0:0"];
}

function itemText(item) {
  const kind = kindOf(item);
  if (kind === "function_call") return `${item.name}(${formatArguments(item.arguments)})`;
  if (kind === "function_call_output") return getText(item.output);
  if (kind === "reasoning") return getText(item.content) || getText(item.summary);
  return getText(item.content);
}

const sameItem = (one, other) => kindOf(one) === kindOf(other) && roleOf(one) === roleOf(other) && itemText(one) === itemText(other);

function compareTexts(one, other) {
  const { Diff } = window;
  const words = Diff.diffWordsWithSpace(one, other, { timeout: 300 });
  return words || Diff.diffLines(one, other) || [{ value: one, removed: true }, { value: other, added: true }];
}

function Side({ item, parts, isFirst }) {
  if (!item) return html`<div></div>`;
  return html`
    <div role="group" class=${`item ${roleOf(item)}`} aria-label=${`${isFirst ? "A" : "B"}: ${kindOf(item)}`}>
      <header><b>${kindOf(item) === "message" ? roleOf(item) : kindOf(item).replaceAll("_", " ")}</b></header>
      <div class="body text">${parts ? parts.filter((part) => (isFirst ? !part.added : !part.removed)).map((part, number) => (part.added ? html`<ins key=${number}>${part.value}</ins>` : part.removed ? html`<del key=${number}>${part.value}</del>` : part.value)) : itemText(item)}</div>
    </div>`;
}

export function DiffPage({ a, b }) {
  const [[runA, idA], [runB, idB]] = [splitName(a), splitName(b)];
  const [first, firstError] = useRequest(`runs/${encodeURIComponent(runA)}/rollouts/${encodeURIComponent(idA)}`);
  const [second, secondError] = useRequest(`runs/${encodeURIComponent(runB)}/rollouts/${encodeURIComponent(idB)}`);
  const pairs = useMemo(() => {
    if (!first || !second) return [];
    const count = Math.max(first.items.length, second.items.length);
    return Array.from({ length: count }, (_, number) => {
      const [one, other] = [first.items[number], second.items[number]];
      return { one, other, same: Boolean(one && other && sameItem(one, other)) };
    });
  }, [first, second]);
  if (firstError || secondError) return html`<${Failure} error=${firstError || secondError} />`;
  if (!first || !second) return html`<${Loading} />`;
  const at = pairs.findIndex((pair) => !pair.same);
  return html`
    <div>
      <div class="page">
        <h2>${at < 0 ? "The transcripts are equal." : `The transcripts differ from item ${at} on.`}</h2>
      </div>
      <div class="diff">
        ${[[first, runA, idA, "A"], [second, runB, idB, "B"]].map(([each, run, id, name]) => html`<div key=${name}><h2>${name}: <a href=${buildAddress(["run", run, id])}>${run} ${id}</a></h2><span class="reward">${describeReward(each.row)}</span> <span class="muted">${each.row.turns} turns, ${each.row.tool_calls} tool calls</span></div>`)}
        ${pairs.map(({ one, other, same }, number) => {
          if (same) return html`<details class="same" key=${number}><summary class="muted">item ${number} is equal: ${roleOf(one)}, ${itemText(one).slice(0, 80)}</summary><${Side} item=${one} isFirst=${true} /></details>`;
          const parts = one && other && kindOf(one) === kindOf(other) ? compareTexts(itemText(one), itemText(other)) : null;
          return html`<${Side} key=${`a${number}`} item=${one} parts=${parts} isFirst=${true} /><${Side} key=${`b${number}`} item=${other} parts=${parts} isFirst=${false} />`;
        })}
      </div>
    </div>`;
}
