// Playing a rollout again, and continuing it differently from a turn; only if the viewer was started with `--play`.
import { Failure, buildAddress, formatReward, html, source, useState } from "./core.js";
import { getText, isPolicyItem, kindOf } from "./transcript.js";

const TOKEN_FIELDS = new Set(["prompt_token_ids", "generation_token_ids", "generation_log_probs"]);

const pathOf = (run, id) => `runs/${encodeURIComponent(run)}/rollouts/${encodeURIComponent(id)}`;

// The turns of the policy: the places of their first items and of their ends.
export function listTurns(items, opening) {
  const turns = [];
  for (let place = opening; place < items.length; place++) {
    if (!isPolicyItem(items[place])) continue;
    const start = place;
    while (place + 1 < items.length && isPolicyItem(items[place + 1])) place++;
    turns.push({ start, end: place + 1 });
  }
  return turns;
}

// The text of a reply, or the JSON of the items of a turn.
function writeTurn(items) {
  if (items.length === 1 && kindOf(items[0]) === "message") return getText(items[0].content);
  const clean = items.map((item) => Object.fromEntries(Object.entries(item).filter(([name]) => !TOKEN_FIELDS.has(name))));
  return JSON.stringify(clean, null, 2);
}

function describeReplay(answer) {
  if (answer.failure) return answer.failure;
  if (answer.diverged !== null) return `diverged at item ${answer.diverged}; reward ${formatReward(answer.reward)}, stored ${formatReward(answer.stored_reward)}`;
  return answer.is_equal ? `equal: items and reward ${formatReward(answer.reward)}` : `reward ${formatReward(answer.reward)}, stored ${formatReward(answer.stored_reward)}`;
}

export function ReplayButton({ run, id }) {
  const [state, setState] = useState({});
  const play = () => {
    setState({ isPlaying: true });
    source.post(`${pathOf(run, id)}/replay`, {}).then((answer) => setState({ answer }), (error) => setState({ error }));
  };
  return html`<span>
    <button disabled=${state.isPlaying} onClick=${play}>${state.isPlaying ? "playing…" : "play again"}</button>
    ${state.answer && html` <span role="status" class=${state.answer.is_equal ? "good" : "bad"}>${describeReplay(state.answer)}</span>`}
    <${Failure} error=${state.error} />
  </span>`;
}

function Result({ run, id, answer }) {
  return html`<div role="status">
    <p>The branch is the run <a href=${buildAddress(["run", answer.run])}>${answer.run}</a>, in ${answer.folder}.</p>
    <table class="plain"><thead><tr><th>repeat</th><th class="num">reward</th><th class="num">turns</th><th></th></tr></thead>
      <tbody>${answer.rollouts.map((each, repeat) => {
        const name = `${id.split(":")[0]}:${repeat}`;
        return html`<tr key=${repeat}><td><a href=${buildAddress(["run", answer.run, name])}>${name}</a></td><td class="num">${formatReward(each.reward)}</td><td class="num">${each.turns}</td>
          <td>${each.failure ? html`<span class="bad">${each.failure}</span>` : html`<a href=${buildAddress(["diff", `${run}:${id}`, `${answer.run}:${name}`])}>compare</a>`}</td></tr>`;
      })}</tbody></table>
    <p class="muted">The stored reward is ${formatReward(answer.rollouts[0].stored_reward)}.</p>
  </div>`;
}

export function BranchDialog({ run, id, items, opening, item, onClose }) {
  const turns = listTurns(items, opening);
  const turn = Math.max(0, turns.findIndex(({ end }) => item < end));
  const [say, setSay] = useState(() => writeTurn(items.slice(turns[turn].start, turns[turn].end)));
  const [model, setModel] = useState("");
  const [repeats, setRepeats] = useState(1);
  const [force, setForce] = useState(false);
  const [state, setState] = useState({});
  const play = (event) => {
    event.preventDefault();
    setState({ isPlaying: true });
    source.post(`${pathOf(run, id)}/branch`, { turn, say, model, repeats, force }).then((answer) => setState({ answer }), (error) => setState({ error }));
  };
  return html`
    <div class="dialog" onClick=${(event) => event.target === event.currentTarget && onClose()}>
      <div role="dialog" aria-modal="true" aria-label="branch">
        <form onSubmit=${play}>
          <h2>Continue ${id} differently</h2>
          <p class="muted">The first ${turn} of ${turns.length} turns are said as stored. The environment answers; its outputs cannot be edited.</p>
          <p><label>next turn: a reply, or JSON with items; empty to let the model say it<br /><textarea style=${{ width: "100%" }} rows="8" value=${say} onInput=${(event) => setSay(event.target.value)} ref=${(element) => element && !element.dataset.seen && ((element.dataset.seen = "1"), element.focus())}></textarea></label></p>
          <p><label>model that plays on; empty for none<br /><input style=${{ width: "100%" }} placeholder="openai/NAME, vllm/NAME, scripted/oracle" value=${model} onInput=${(event) => setModel(event.target.value)} /></label></p>
          <p><label>repeats <input type="number" min="1" max="16" value=${repeats} onInput=${(event) => setRepeats(Number(event.target.value))} /></label>
            ${" "}<label><input type="checkbox" checked=${force} onChange=${(event) => setForce(event.target.checked)} /> go on if the environment answers differently</label></p>
          <${Failure} error=${state.error} />
          <p><button class="primary" type="submit" disabled=${state.isPlaying}>${state.isPlaying ? "playing…" : "play"}</button> <button type="button" onClick=${onClose}>close</button></p>
        </form>
        ${state.answer && html`<${Result} run=${run} id=${id} answer=${state.answer} />`}
      </div>
    </div>`;
}
