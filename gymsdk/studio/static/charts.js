// Small charts in SVG.
import { html, formatReward, formatSeconds } from "./core.js";

export function Histogram({ bins, onChoose }) {
  if (!bins || !bins.length) return null;
  const most = Math.max(...bins.map((bin) => bin.count), 1);
  const width = 200, height = 46, step = width / bins.length;
  const total = bins.reduce((sum, bin) => sum + bin.count, 0);
  return html`
    <svg class="bars" viewBox=${`0 0 ${width} ${height + 14}`} role="img" aria-label=${`Rewards of ${total} rollouts from ${formatReward(bins[0].low)} to ${formatReward(bins.at(-1).high)}`}>
      ${bins.map((bin, number) => {
        const tall = bin.count ? Math.max(2, (bin.count / most) * height) : 0;
        return html`<rect key=${number} x=${number * step + 0.5} y=${height - tall} width=${step - 1} height=${tall} onClick=${() => onChoose && onChoose(bin)}><title>${formatReward(bin.low)} to ${formatReward(bin.high)}: ${bin.count}</title></rect>`;
      })}
      <text x="0" y=${height + 12}>${formatReward(bins[0].low)}</text>
      <text x=${width} y=${height + 12} text-anchor="end">${formatReward(bins.at(-1).high)}</text>
    </svg>`;
}

// The times of each turn: the model's call, and the environment's steps.
export function Waterfall({ timing }) {
  const turns = timing?.turns;
  if (!turns || !turns.length) return null;
  const stages = timing.stages || {};
  const end = Math.max(...turns.map(([start, model, step]) => start + model + step)) + (stages.verify || 0);
  const width = 640, row = 14, scale = (width - 60) / Math.max(end, 0.001);
  const shown = turns.slice(0, 200);
  const verifyAt = Math.max(...turns.map(([start, model, step]) => start + model + step));
  return html`
    <figure style=${{ margin: "6px 0" }}>
      <svg class="wave" viewBox=${`0 0 ${width} ${(shown.length + 2) * row + 4}`} role="img" aria-label=${`Times of ${turns.length} turns, ${formatSeconds(end / 1000)} in all`}>
        <text x="0" y=${row - 3}>reset</text>
        <rect class="wait" x="52" y="2" width=${Math.max(1, (stages.reset || 0) * scale)} height=${row - 4}><title>reset: ${formatSeconds((stages.reset || 0) / 1000)}</title></rect>
        ${shown.map(([start, model, step], number) => html`
          <g key=${number} transform=${`translate(52 ${(number + 1) * row + 2})`}>
            <text x="-52" y=${row - 5}>turn ${number + 1}</text>
            <rect class="model" x=${start * scale} y="0" width=${Math.max(1, model * scale)} height=${row - 4}><title>model: ${formatSeconds(model / 1000)}</title></rect>
            <rect class="step" x=${(start + model) * scale} y="0" width=${Math.max(1, step * scale)} height=${row - 4}><title>steps: ${formatSeconds(step / 1000)}</title></rect>
          </g>`)}
        <g transform=${`translate(52 ${(shown.length + 1) * row + 2})`}>
          <text x="-52" y=${row - 5}>verify</text>
          <rect class="wait" x=${verifyAt * scale} y="0" width=${Math.max(1, (stages.verify || 0) * scale)} height=${row - 4}><title>verify: ${formatSeconds((stages.verify || 0) / 1000)}</title></rect>
        </g>
      </svg>
      <figcaption class="muted">blue: the model, orange: the environment's steps; ${formatSeconds(end / 1000)}${turns.length > shown.length ? `; the first ${shown.length} of ${turns.length} turns` : ""}</figcaption>
    </figure>`;
}

export function Scatter({ pairs, a, b, onChoose }) {
  const size = 260, pad = 30;
  const values = pairs.flatMap((pair) => [pair.a, pair.b]);
  const low = Math.min(0, ...values), high = Math.max(1, ...values);
  const at = (value) => ((value - low) / (high - low || 1)) * size;
  return html`
    <svg class="scatter" width=${size + 2 * pad} height=${size + 2 * pad} viewBox=${`${-pad} ${-pad} ${size + 2 * pad} ${size + 2 * pad}`} role="img" aria-label=${`Mean reward of ${pairs.length} tasks: ${a} to the right, ${b} upwards`}>
      <line x1="0" y1=${size} x2=${size} y2=${size} /><line x1="0" y1="0" x2="0" y2=${size} /><line x1="0" y1=${size} x2=${size} y2="0" stroke-dasharray="3 3" />
      ${pairs.slice(0, 3000).map((pair, number) => html`<circle key=${number} cx=${at(pair.a)} cy=${size - at(pair.b)} r="4" onClick=${() => onChoose && onChoose(pair)}><title>task ${pair.task_a}: ${formatReward(pair.a)} → ${formatReward(pair.b)}</title></circle>`)}
      <text x=${size} y=${size + 20} text-anchor="end">A: ${a}</text><text x="0" y="-10">B: ${b}</text>
      <text x="-8" y=${size + 14} text-anchor="end">${formatReward(low)}</text><text x="-8" y="8" text-anchor="end">${formatReward(high)}</text>
    </svg>`;
}
