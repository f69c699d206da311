// The conditions of an exported page, which has no server. `gymsdk/runs/filters.py` defines them: it says what each
// condition means, and writes the fields, the operators and the form of numbers into the page as `grammar`.

export class ConditionError extends Error {}

const MAX_INTEGER = 2n ** 63n - 1n;
const CONDITION = /^\s*([^=!<>~]*?)\s*(==|=~|!~|~=|<>|!=|<=|>=|=|<|>|~|!|$)\s*([^]*?)\s*$/d;

// Returns the field, the operator and the value of a condition in text.
export function parseCondition(text, grammar) {
  const found = CONDITION.exec(text);
  const [, field, symbol, given] = found;
  if (!symbol) throw new ConditionError(`'${text}' is not a condition; write FIELD=VALUE, with one of ${grammar.symbols} (at position ${[...text].length + 1})`);
  const operator = symbol === "~" ? "contains" : symbol;
  const value = operator !== "contains" && grammar.missing.includes(given) ? null : unquote(given);
  return check(field, operator, value, grammar, (part, message) => {
    throw new ConditionError(`${message} (at position ${[...text.slice(0, found.indices[part][0])].length + 1} of '${text}')`);
  });
}

// Returns a condition of an address, in text or in parts, with a value of its field's type.
export function readCondition(condition, grammar) {
  if (typeof condition === "string") return parseCondition(condition, grammar);
  if (condition.length !== 3) throw new ConditionError("a condition is a list of a field, an operator and a value");
  return check(...condition, grammar, (part, message) => { throw new ConditionError(message); });
}

// Returns the value of a row's field, null for a missing one.
export function getValue(row, field) {
  const value = field.startsWith("figure:") ? row.figures[field.slice("figure:".length)] : row[field];
  return value === undefined || value === "" ? null : value;
}

export function matches(row, [field, operator, value], grammar) {
  if (operator === "!=") return !matches(row, [field, "=", value], grammar);
  if (operator === "in") return value.some((one) => matches(row, [field, "=", one], grammar));
  if (field === "lens") return row.lenses.includes(value);
  if (grammar.fields[field] === "tools") {
    const names = Object.entries(row.tools).filter(([, [, errors]]) => field === "tool" || errors > 0).map(([name]) => name);
    return value === null ? names.length === 0 : names.some((name) => compare(name, operator, value));
  }
  if (getKind(field, grammar) === "values") return matchesValues(row.fields[field] || [], operator, value, grammar);
  const own = getValue(row, field);
  return own === null || value === null ? operator === "=" && own === value : compare(own, operator, value);
}

const getKind = (field, grammar) => (field.startsWith("row:") ? "values" : grammar.fields[field]);

// `values` are pairs of a text and a number, which is null for a text. A number has no order with a text.
function matchesValues(values, operator, value, grammar) {
  if (value === null) return values.length === 0;
  const number = new RegExp(`^(?:${grammar.number})$`).test(value) ? Number(value.replaceAll("_", "")) : null;
  if (operator === "contains" || number === null) {
    return values.some(([text, own]) => (own === null || !["<", "<=", ">", ">="].includes(operator)) && compare(text, operator, value));
  }
  return values.some(([text, own]) => (operator === "=" && text === value) || (own !== null && compare(own, operator, number)));
}

// Returns a negative number if `one` comes first. Python and SQLite order texts by code points, `<` by UTF-16 units.
export function compareValues(one, other) {
  if (typeof one !== "string") return one < other ? -1 : one > other ? 1 : 0;
  const [first, second] = [one, other].map((text) => Array.from(text, (character) => character.codePointAt(0)));
  const index = first.findIndex((code, number) => code !== second[number]);
  if (index < 0) return first.length - second.length;
  return index >= second.length ? 1 : first[index] - second[index];
}

export const isSortable = (field, grammar) => field.startsWith("figure:") || ["number", "text"].includes(grammar.fields[field]);

function compare(own, operator, value) {
  if (operator === "contains") return own.toLowerCase().includes(value.toLowerCase());
  const order = compareValues(own, value);
  return { "=": order === 0, "<": order < 0, "<=": order <= 0, ">": order > 0, ">=": order >= 0 }[operator];
}

function unquote(text) {
  if (text.length < 2 || !text.startsWith('"') || !text.endsWith('"')) return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

// `fail` gets the number of the part, from 1, and what is wrong with it.
function check(field, operator, value, grammar, fail) {
  const isFigure = typeof field === "string" && field.startsWith("figure:") && field !== "figure:";
  const isRow = typeof field === "string" && field.startsWith("row:") && field !== "row:";
  const kind = isFigure ? "number" : isRow ? "values" : Object.hasOwn(grammar.fields, field) ? grammar.fields[field] : fail(1, `there is no field '${field}'`);
  if (!grammar.operators.text.includes(operator)) fail(2, `there is no operator '${operator}'`);
  const lensForm = `a condition on \`lens\` is lens=NAME, with one of: ${grammar.lenses.join(", ")}`;
  if (!grammar.operators[kind].includes(operator)) fail(2, kind === "lens" ? lensForm : `'${field}' has only the operators ${grammar.operators[kind].join(", ").replace("contains", "~")}`);
  if (kind === "lens") return grammar.lenses.includes(value) ? [field, operator, value] : fail(3, lensForm);
  const convert = (one) => convertValue(field, kind, one, grammar, (message) => fail(3, message));
  if (operator === "in") {
    const values = Array.isArray(value) ? value : [value];
    if (values.length > grammar.max_values) fail(3, `a condition on '${field}' has more than ${grammar.max_values} values`);
    return [field, operator, values.map(convert)];
  }
  const converted = convert(value);
  if (converted === null && operator !== "=" && operator !== "!=") fail(3, `expected ${kind === "number" ? "a number" : "a text"} to compare '${field}' with; only = and != find missing values`);
  return [field, operator, converted];
}

function convertValue(field, kind, value, grammar, fail) {
  if (value === null || value === "") return null;
  if (!["string", "number", "boolean"].includes(typeof value)) return fail(`the value of '${field}' must be text or a number`);
  if (kind !== "number") return String(value);
  if (typeof value !== "string") return Number(value);
  const text = value.trim();
  if (grammar.missing.includes(text)) return null;
  if (!new RegExp(`^(?:${grammar.number})$`).test(text)) fail(`the value of '${field}' must be a number such as 0.5, or none, got '${value}'`);
  const digits = text.replaceAll("_", "");
  if (/^[+-]?\d+$/.test(digits) && BigInt(digits.replace(/^[+-]/, "")) > MAX_INTEGER) fail(`the value of '${field}' must be a number of at most 64 bits`);
  return Number.isFinite(Number(digits)) ? Number(digits) : fail(`the value of '${field}' must be a finite number`);
}
