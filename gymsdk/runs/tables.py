"""Tables of a run for Arrow, Parquet, pandas and polars: one row per rollout, message, tool call or metric."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from gymsdk import jsonl
from gymsdk.errors import UsageError
from gymsdk.line import StoredRollout
from gymsdk.runs.filters import Filter
from gymsdk.runs.queries import RunQueries
from gymsdk.runs.records import get_reasoning, get_text, is_tool_error
from gymsdk.runs.source import RunSource
from gymsdk.types import Row, is_policy_item, pair_outputs

if TYPE_CHECKING:
    import pyarrow as pa

Table: TypeAlias = Literal["rollouts", "messages", "tool_calls", "steps", "metrics"]
"""The tables of a run."""

BATCH_ROWS = 5000
"""The number of rows that are converted at once."""


def iter_rows(queries: RunQueries, table: Table, chosen: Filter | None = None) -> Iterator[Row]:
    """Yield the rows of a table.

    Args:
        queries: The run.
        table: `rollouts`: the columns of the index, and the numbers of the verdict and the components of the reward
            (`part/NAME`). `messages`: the items of the conversations, with role, type and text. `tool_calls`: the calls
            with their arguments and outputs. `steps`: the rewards of the steps, if there are any. `metrics`: the
            metrics of each environment at the end of the run.
        chosen: Which rollouts; the table `metrics` is about all of them.

    Raises:
        UsageError: There is no such table, or rollouts are chosen for the table `metrics`.
    """
    _check_table(table)
    if table == "metrics":
        if chosen is not None and (chosen.where or chosen.search):
            raise UsageError("the table 'metrics' is about all rollouts of the run; leave out the conditions")
        yield from _iter_metrics(queries.index.source)
        return
    kinds = queries.describe_fields() if table == "rollouts" else {}
    for row in queries.iter_rows(chosen):
        if table == "rollouts":
            kept = {key: value for key, value in row.items() if key not in {"id", "flags"}}
            yield kept | queries.get_figures(row["id"]) | _convert_fields(queries.get_fields(row["id"]), kinds)
            continue
        keys = {name: row[name] for name in ("environment", "task", "repeat", "reward")}
        stored = queries.read(row["id"])
        yield from (keys | values for values in _ROWS[table](stored))


def build_arrow(queries: RunQueries, table: Table, chosen: Filter | None = None) -> pa.Table:
    """Return a table as an Arrow table; see `iter_rows`.

    Raises:
        UsageError: pyarrow is not installed.
    """
    arrow = _import("pyarrow", "arrow")
    batches = [
        arrow.RecordBatch.from_pylist(rows, schema=schema) for rows, schema in _iter_batches(queries, table, chosen)
    ]
    return arrow.Table.from_batches(batches) if batches else arrow.table({name: [] for name in _FIELDS[table]})


def write_parquet(queries: RunQueries, path: Path, table: Table, chosen: Filter | None = None) -> int:
    """Write a table to a Parquet file, batch by batch, and return the number of rows.

    Raises:
        UsageError: pyarrow is not installed, or the file cannot be written.
    """
    arrow, parquet = _import("pyarrow", "arrow"), _import("pyarrow.parquet", "arrow")
    count, writer = 0, None
    part = path.with_name(f"{path.name}.part")
    try:
        for rows, schema in _iter_batches(queries, table, chosen):
            writer = writer or parquet.ParquetWriter(part, schema)
            writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema=schema))
            count += len(rows)
        if writer is None:
            raise UsageError(f"{_MISSING.get(table, 'no rollout is chosen')}; the file would be empty")
        writer.close()
        # An error in the middle leaves an earlier file as it is.
        part.replace(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written ({error.strerror or error})") from error
    finally:
        part.unlink(missing_ok=True)
    return count


def build_dataframe(
    queries: RunQueries,
    table: Table,
    chosen: Filter | None = None,
    *,
    library: Literal["pandas", "polars"] | None = None,
) -> Any:
    """Return a table as a data frame of pandas or polars, by default of the installed library.

    Raises:
        UsageError: The library is not installed.
    """
    for name in (library,) if library else ("pandas", "polars"):
        try:
            module = import_module(name)
        except ImportError:
            continue
        data = build_arrow(queries, table, chosen)
        return data.to_pandas() if name == "pandas" else module.from_arrow(data)
    wanted = library or "pandas"
    raise UsageError(f"{wanted} is not installed; run `pip install 'gymsdk[{wanted}]'`")


def _check_table(table: str) -> None:
    if table not in get_args(Table):
        raise UsageError(f"there is no table {table!r}; the tables: {', '.join(get_args(Table))}")


def _iter_metrics(source: RunSource) -> Iterator[Row]:
    for entry in source.read_metrics():
        for name, value in (entry.get("agent_metrics") or {}).items():
            if jsonl.is_finite_number(value):
                yield {"environment": entry.get("environment"), "metric": name, "value": float(value)}


def _iter_messages(stored: StoredRollout) -> Iterator[Row]:
    turn, was_policy = 0, False
    for number, item in enumerate((*stored.opening, *stored.output)):
        kind = str(item.get("type", "message"))
        is_policy = is_policy_item(item)
        turn += is_policy and not was_policy
        was_policy = is_policy
        text = get_reasoning(item) if kind == "reasoning" else get_text(item.get("content"))
        yield {
            "index": number,
            "turn": turn,
            "type": kind,
            "role": _to_text(item.get("role")) or ("tool" if kind == "function_call_output" else "assistant"),
            "text": get_text(item.get("output")) if kind == "function_call_output" else text,
            "tool": _to_text(item.get("name")) if kind == "function_call" else None,
            "arguments": _to_text(item.get("arguments")) if kind == "function_call" else None,
            "call_id": _to_text(item.get("call_id")),
        }


def _to_text(value: object) -> str | None:
    """Return a value that must be text, and that another program may have written as something else."""
    return value if value is None or isinstance(value, str) else jsonl.dump_portable_json(value).decode()


def _iter_tool_calls(stored: StoredRollout) -> Iterator[Row]:
    items = [*stored.opening, *stored.output]
    outputs = {call: get_text(items[output].get("output")) for call, output in pair_outputs(items).items()}
    calls = (message for message in _iter_messages(stored) if message["type"] == "function_call")
    for call in calls:
        found = outputs.get(call["index"])
        names = ("index", "turn", "tool", "arguments", "call_id")
        error = None if found is None else is_tool_error(found)
        yield {name: call[name] for name in names} | {"output": found, "is_error": error}


def _iter_steps(stored: StoredRollout) -> Iterator[Row]:
    for index, reward in enumerate(stored.record.step_rewards):
        yield {"index": index, "step_reward": reward}


_ROWS = {"messages": _iter_messages, "tool_calls": _iter_tool_calls, "steps": _iter_steps}
"""What reads the rows of a rollout from its line, for each table that needs the line."""

_MISSING = {"metrics": "the run has no metrics yet", "steps": "no step of the chosen rollouts has a reward"}
"""Why a table may be empty."""

_KEYS = {"environment": "string", "task": "int64", "repeat": "int64", "reward": "float64"}
_FIELDS: dict[Table, dict[str, str]] = {
    "rollouts": {
        **_KEYS,
        "outcome": "string",
        "ended": "string",
        "turns": "int64",
        "tool_calls": "int64",
        "tokens": "int64",
        "seconds": "float64",
        "model_seconds": "float64",
        "started": "float64",
        "answer": "string",
        "prompt": "string",
        "failure": "string",
        "stage": "string",
        "message": "string",
    },
    "messages": {
        **_KEYS,
        "index": "int64",
        "turn": "int64",
        "type": "string",
        "role": "string",
        "text": "string",
        "tool": "string",
        "arguments": "string",
        "call_id": "string",
    },
    "tool_calls": {
        **_KEYS,
        "index": "int64",
        "turn": "int64",
        "tool": "string",
        "arguments": "string",
        "call_id": "string",
        "output": "string",
        "is_error": "bool_",
    },
    "steps": {**_KEYS, "index": "int64", "step_reward": "float64"},
    "metrics": {"environment": "string", "metric": "string", "value": "float64"},
}
"""The columns of each table with their Arrow types; the rollouts have the numbers of their verdicts beside them."""


def _iter_batches(queries: RunQueries, table: Table, chosen: Filter | None) -> Iterator[tuple[list[Row], pa.Schema]]:
    """Yield the rows in batches, each with the schema, which is the same for all."""
    _check_table(table)
    arrow = _import("pyarrow", "arrow")
    fields = [(name, getattr(arrow, kind)()) for name, kind in _FIELDS[table].items()]
    if table == "rollouts":
        fields += [(name, arrow.float64()) for name in queries.list_figures() if name not in _FIELDS[table]]
        types = {"number": arrow.float64(), "text": arrow.string(), "list": arrow.list_(arrow.string())}
        fields += [(name, types[kind]) for name, kind in queries.describe_fields().items()]
    schema = arrow.schema(fields)
    batch: list[Row] = []
    for row in iter_rows(queries, table, chosen):
        batch.append(_clean(row))
        if len(batch) == BATCH_ROWS:
            yield batch, schema
            batch = []
    if batch:
        yield batch, schema


def _convert_fields(fields: Mapping[str, Sequence[tuple[str, float | None]]], kinds: Mapping[str, str]) -> Row:
    """Return the values of the fields of a rollout as its columns of these *kinds* have them."""
    row: Row = {}
    for name, values in fields.items():
        text, number = values[0]
        row[name] = [text for text, _ in values] if kinds[name] == "list" else text if kinds[name] == "text" else number
    return row


def _clean(row: Row) -> Row:
    """Return *row* without unpaired surrogates, which Arrow's UTF-8 does not have."""
    return {
        key: value.encode("utf-8", "replace").decode() if isinstance(value, str) and not value.isascii() else value
        for key, value in row.items()
    }


def _import(name: str, extra: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UsageError(f"{package} is not installed; run `pip install 'gymsdk[{extra}]'`") from None
