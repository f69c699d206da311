// The list of runs, two of which can be compared.
import { Failure, Loading, buildAddress, formatDate, formatNumber, html, useRequest, useState } from "./core.js";

export function RunsPage() {
  const [runs, error] = useRequest("runs");
  const [chosen, setChosen] = useState([]);
  if (error) return html`<${Failure} error=${error} />`;
  if (!runs) return html`<${Loading} />`;
  if (!runs.length) return html`<div class="empty">There are no runs yet. <code>gymsdk rollout</code> writes one.</div>`;
  const toggle = (run) => setChosen(chosen.includes(run) ? chosen.filter((each) => each !== run) : [...chosen, run].slice(-2));
  return html`
    <div class="page">
      <p><button class="primary" disabled=${chosen.length !== 2} onClick=${() => (location.hash = buildAddress(["compare", ...chosen]))}>compare two runs</button> <span class="muted">${chosen.length === 2 ? `A is ${chosen[0]}, B is ${chosen[1]}` : "choose two; the first is A"}</span></p>
      <table class="plain"><thead><tr><th><span class="visually-hidden">choose</span></th><th>run</th><th>model</th><th>environments</th><th class="num">scored of asked</th><th class="num">mean reward</th><th>started</th></tr></thead>
        <tbody>${runs.map((run) => html`
          <tr key=${run.run}><td><input type="checkbox" aria-label=${`choose ${run.name}`} checked=${chosen.includes(run.run)} onChange=${() => toggle(run.run)} /></td>
            <td><a href=${buildAddress(["run", run.run])} title=${run.path}>${run.run}</a>${(run.bad_files || []).map((bad) => html`<div class="warn">${bad.file}: ${bad.message}</div>`)}</td><td>${run.model || ""}</td><td>${run.environments.join(", ")}</td>
            <td class="num">${run.is_finished ? formatNumber(run.scored || 0) : "running"}${run.asked ? ` of ${formatNumber(run.asked)}` : ""}</td>
            <td class="num">${run.mean === null ? "–" : run.mean.toFixed(3)}</td><td>${formatDate(run.started)}</td></tr>`)}</tbody></table>
    </div>`;
}
