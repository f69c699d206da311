// The data of an exported page: answers the same requests as the API, from rows and compressed lines in the page itself.
import { ApiError, source } from "./core.js";
import { ConditionError, compareValues, getValue, isSortable, matches, parseCondition, readCondition } from "./filters.js";
import { getText } from "./transcript.js";

const MAX_ROWS = 1000;

async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// Chunks are classic scripts, because a page from disk may load no other files.
function loadChunk(name) {
  const data = window.gymsdkData;
  if (data.chunks[name] !== undefined) return Promise.resolve(data.chunks[name]);
  return new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = `data/${name}.js`;
    script.onload = () => resolve(data.chunks[name]);
    script.onerror = () => reject(new ApiError(`data/${name}.js cannot be read; is the folder complete?`));
    document.head.append(script);
  });
}

const unpacked = new Map();

function readChunk(name) {
  if (!unpacked.has(name)) unpacked.set(name, loadChunk(name).then(unpack));
  return unpacked.get(name);
}

const runs = new Map();

async function getRun(key) {
  if (!runs.has(key)) {
    const known = (await readChunk("runs")).find((run) => run.run === key);
    if (!known) throw new ApiError(`there is no run '${key}' on this page`);
    runs.set(key, { info: known, rows: await readChunk(known.rows_chunk) });
  }
  return runs.get(key);
}

function readTexts(line) {
  const opening = line.responses_create_params?.input;
  const items = [...(typeof opening === "string" ? [{ content: opening }] : opening || []), ...(line.response?.output || [])];
  return items.map((item) => [getText(item.content), getText(item.output), getText(item.summary), item.name || "", item.arguments || ""].join("\n"));
}

const searches = new Map();

async function search(run, text) {
  const wanted = text.trim().split(/\s+/).join(" ").toLowerCase();
  const key = `${run.info.run} ${wanted}`;
  if (!searches.has(key)) {
    const found = new Set();
    for (const name of run.info.chunks) {
      const lines = await readChunk(name);
      for (const [id, line] of Object.entries(lines)) {
        if (readTexts(line).some((each) => each.split(/\s+/).join(" ").toLowerCase().includes(wanted))) found.add(Number(id));
      }
    }
    searches.set(key, found);
  }
  return searches.get(key);
}

async function choose(run, { where = [], q = "" }, grammar) {
  if (where.length > grammar.max_conditions) throw new ApiError(`a filter has ${where.length} conditions; at most ${grammar.max_conditions} are possible`);
  const conditions = where.map((condition) => readCondition(condition, grammar));
  const found = q && q.trim() ? await search(run, q) : null;
  return run.rows.filter((row) => conditions.every((condition) => matches(row, condition, grammar)) && (!found || found.has(row.id)));
}

function sortRows(rows, sort, descending, grammar) {
  if (!isSortable(sort, grammar)) throw new ApiError(`there is no field '${sort}' to sort by`);
  const sign = descending ? -1 : 1;
  return [...rows].sort((one, other) => {
    const [a, b] = [getValue(one, sort), getValue(other, sort)];
    if (a === null || b === null) return a === b ? sign * (one.id - other.id) : a === null ? 1 : -1;
    return sign * (compareValues(a, b) || one.id - other.id);
  });
}

const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

function countValues(rows, getValues, most) {
  const counts = new Map();
  for (const row of rows) for (const value of getValues(row)) if (value !== null && value !== "" && value !== undefined) counts.set(value, (counts.get(value) || 0) + 1);
  return [...counts].map(([value, count]) => ({ value, count })).sort((one, other) => other.count - one.count || compareValues(one.value, other.value)).slice(0, most);
}

// As with a server, the values in the whole run decide whether a field is counted, not those of the chosen rollouts.
function listCountedFields(rows, most) {
  const texts = new Map();
  for (const row of rows) {
    for (const [name, values] of Object.entries(row.fields)) {
      if (!texts.has(name)) texts.set(name, new Set());
      for (const [value] of values) texts.get(name).add(value);
    }
  }
  return new Set([...texts].filter(([name, values]) => name !== "note" && values.size <= most).map(([name]) => name));
}

function countFields(rows, names) {
  const fields = new Map();
  for (const row of rows) {
    for (const [name, values] of Object.entries(row.fields)) {
      if (!names.has(name)) continue;
      if (!fields.has(name)) fields.set(name, new Map());
      for (const [value, number] of values) {
        const known = fields.get(name).get(value) || { value, number, count: 0, rewards: [] };
        known.count++;
        if (row.reward !== null) known.rewards.push(row.reward);
        fields.get(name).set(value, known);
      }
    }
  }
  const order = (one, other) => (one.number === null) - (other.number === null) || (one.number ?? 0) - (other.number ?? 0) || other.count - one.count || compareValues(one.value, other.value);
  return [...fields].sort(([one], [other]) => compareValues(one, other)).map(([name, values]) => ({
    name,
    values: [...values.values()].sort(order).map(({ value, count, rewards }) => ({ value, count, mean: mean(rewards) })),
  }));
}

function buildHistogram(rows, edges) {
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  if (!rewards.length) return [];
  const bins = edges.slice(1).map((high, number) => ({ low: edges[number], high, count: 0 }));
  for (const reward of rewards) (bins.findLast(({ low }) => reward >= low) || bins[0]).count++;
  return bins;
}

function groupRows(rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = `${row.environment} ${row.task}`;
    if (!groups.has(key)) groups.set(key, { environment: row.environment, task: row.task, prompt: row.prompt, rollouts: [] });
    groups.get(key).rollouts.push({ id: row.id, repeat: row.repeat, reward: row.reward });
  }
  for (const group of groups.values()) {
    const rewards = group.rollouts.map((each) => each.reward).filter((reward) => reward !== null);
    group.rollouts.sort((one, other) => one.repeat - other.repeat);
    group.scored = rewards.length;
    group.mean = mean(rewards);
    group.spread = rewards.length ? Math.sqrt(mean(rewards.map((reward) => (reward - group.mean) ** 2))) : null;
  }
  return [...groups.values()].sort((one, other) => (one.mean ?? -Infinity) - (other.mean ?? -Infinity) || one.task - other.task);
}

function listTools(rows) {
  const tools = new Map();
  for (const row of rows) {
    for (const [name, [calls, errors]] of Object.entries(row.tools)) {
      const tool = tools.get(name) || { tool: name, calls: 0, errors: 0, rollouts: 0, having: new Set() };
      tool.calls += calls;
      tool.errors += errors;
      tool.rollouts++;
      tool.having.add(row.id);
      tools.set(name, tool);
    }
  }
  const scored = rows.filter((row) => row.reward !== null);
  return [...tools.values()].sort((one, other) => other.calls - one.calls || compareValues(one.tool, other.tool)).map(({ having, ...tool }) => ({
    ...tool,
    mean_with: mean(scored.filter((row) => having.has(row.id)).map((row) => row.reward)),
    mean_without: mean(scored.filter((row) => !having.has(row.id)).map((row) => row.reward)),
  }));
}

function listFailures(rows) {
  const kinds = new Map();
  for (const row of rows.filter((each) => each.reward === null)) {
    const key = `${row.failure} ${row.stage}`;
    const kind = kinds.get(key) || { kind: row.failure, stage: row.stage, count: 0, message: row.message };
    kind.count++;
    kinds.set(key, kind);
  }
  return [...kinds.values()].sort((one, other) => other.count - one.count || compareValues(one.kind, other.kind));
}

async function readRollout(run, name) {
  const [task, repeat] = name.split(":").map(Number);
  const row = run.rows.find((each) => each.task === task && each.repeat === repeat);
  if (!row) throw new ApiError(`the run '${run.info.run}' has no rollout '${name}' on this page`);
  const line = (await readChunk(row.chunk))[row.id];
  const opening = line.responses_create_params?.input;
  const prompt = typeof opening === "string" ? [{ role: "user", content: opening }] : opening || [];
  const items = [...prompt, ...(line.response?.output || [])];
  const { response, responses_create_params: parameters, ...rest } = line;
  return { row, figures: row.figures, verdict: row.verdict, line: rest, items, total_items: items.length, opening: prompt.length };
}

function checkText(text, grammar) {
  try {
    return { condition: parseCondition(text, grammar) };
  } catch (error) {
    if (!(error instanceof ConditionError)) throw error;
    return { error: error.message };
  }
}

async function answer(path, parameters) {
  const parts = path.split("/").map(decodeURIComponent);
  if (path === "runs") return readChunk("runs");
  if (path === "compare") {
    const found = (await readChunk("comparisons"))[JSON.stringify([parameters.a, parameters.b])];
    if (!found) throw new ApiError("this page holds no comparison of these runs");
    return found;
  }
  const grammar = await readChunk("grammar");
  if (path === "condition") return checkText(parameters.text || "", grammar);
  const run = await getRun(parts[1]);
  const rows = parts.length > 2 ? await choose(run, parameters, grammar) : run.rows;
  const [offset, limit] = [Number(parameters.offset) || 0, Math.min(Number(parameters.limit) || MAX_ROWS, MAX_ROWS)];
  // Without the names of the run and the rollout.
  switch ([...parts.slice(2, 3), ...parts.slice(4)].join("/")) {
    case "":
      return run.info;
    case "rows":
      return { total: rows.length, offset, rows: sortRows(rows, parameters.sort || "id", parameters.desc === "1", grammar).slice(offset, offset + limit) };
    case "facets":
      return {
        ...Object.fromEntries(["environment", "outcome", "ended", "failure"].map((name) => [name, countValues(rows, (row) => [row[name]], grammar.max_listed_values)])),
        tool: countValues(rows, (row) => Object.keys(row.tools), grammar.max_listed_values),
        fields: countFields(rows, listCountedFields(run.rows, grammar.max_counted_values)),
        reward: buildHistogram(rows, run.info.reward_edges),
        figures: run.info.figures,
      };
    case "tasks": {
      const groups = groupRows(rows);
      return { total: groups.length, offset, tasks: groups.slice(offset, offset + limit) };
    }
    case "tools":
      return listTools(rows);
    case "failures":
      return listFailures(rows);
    case "notes":
      return run.info.notes;
    case "rollouts":
      return readRollout(run, parts[3]);
    default:
      throw new ApiError(`an exported page has no ${path}`);
  }
}

source.live = false;
source.get = (path, parameters = {}) => answer(path, parameters);
