"""`gymsdk show`: print a stored run, or one of its transcripts."""

from __future__ import annotations

import re
import shutil
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field

from gymsdk.cli import options
from gymsdk.cli.fields import take_models
from gymsdk.cli.output import echo, get_output, print_json
from gymsdk.errors import UsageError
from gymsdk.settings import SELECTION, Flag
from gymsdk.working_folder import shorten_path

if TYPE_CHECKING:
    from rich.table import Table

    from gymsdk.episode_record import EpisodeRecord
    from gymsdk.line import StoredRollout
    from gymsdk.runs import Run
    from gymsdk.types import Item, Row

JSON_SPACE = re.compile(r'("(?:[^"\\]|\\.)*")|\s+')
"""A string of JSON, in which white space counts, or white space between the values."""

SHOWN_CHARACTERS = frozenset("\t\u200c\u200d")
"""The characters of the escaped categories that are shown: they join the parts of scripts and of emojis."""

ESCAPED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""The categories of Unicode that control how text is shown: controls, formats, surrogates and separators of lines."""


class RolloutChoice(BaseModel):
    """Which rollouts of a run are shown, and in which order."""

    where: Annotated[tuple[str, ...], Flag(SELECTION, "CONDITION")] = Field(
        (),
        description="Choose rollouts by a condition such as reward<1, tool=get_weather, ended!=done or prompt~weather;"
        " several conditions must all hold.",
    )
    search: Annotated[str, Flag(SELECTION, "TEXT", shown=False)] = Field(
        "", description="Choose rollouts whose conversation has this text."
    )
    sort: Annotated[str, Flag(SELECTION, "FIELD")] = Field(
        "reward", description="Sort the rollouts by this field, the lowest first."
    )
    descending: Annotated[bool, Flag(SELECTION)] = Field(False, description="List the highest first.")
    limit: Annotated[int, Flag(SELECTION, "N")] = Field(20, ge=0, le=1000, description="List at most N rollouts.")
    by: Annotated[str | None, Flag(SELECTION, "FIELD")] = Field(
        None,
        description="Print the mean reward for each value of a field: row:NAME, a field of the row, tag, note, tool,"
        " or a column such as ended.",
    )


@take_models
def show(
    run: Annotated[Path, typer.Argument(help="The folder of a run, or a JSONL file of rollouts.")],
    rollout: Annotated[
        str | None,
        typer.Argument(metavar="ID", help="Print the transcript of this rollout, such as 3:0.", show_default=False),
    ] = None,
    *,
    choice: RolloutChoice,
    json: options.Json = False,
) -> None:
    """Print a stored run with its lowest rewards, or one transcript.

    Examples:
        gymsdk show rollouts/math-20260101-120000
        gymsdk show rollouts/math-20260101-120000 3:0
        gymsdk show rollouts/math-20260101-120000 --where 'reward<1' --search Oslo --by row:difficulty
    """
    from gymsdk import runs

    with runs.read(run) as stored:
        if rollout is None:
            if choice.search:
                stored.index.update_texts()
            _show_run(stored, choice, json=json)
        else:
            _show_rollout(stored, rollout, json=json)


def _show_run(stored: Run, choice: RolloutChoice, *, json: bool) -> None:
    from rich.console import Console

    from gymsdk.runs import build_filter

    chosen = build_filter(choice.where, choice.search)
    summary = stored.queries.summarize(chosen)
    failures = stored.queries.list_failures(chosen)
    rows = stored.queries.list_rows(chosen, sort=choice.sort, descending=choice.descending, limit=choice.limit)
    groups = {} if choice.by is None else {"groups": stored.queries.group(choice.by, chosen)}
    if json:
        content = {"run": stored.name, "summary": summary, "failures": failures, **groups, "rollouts": rows}
        print_json(content)
        _warn(stored)
        return
    for line in _format_summary(stored, summary, is_chosen=bool(choice.where or choice.search)):
        echo(line)
    for failure in failures:
        echo(f"failed at {failure['stage'] or '?'}: {failure['kind']}, {failure['count']} times")
        echo(f"  {clean(failure['message'])[:300]}")
    console = Console(file=get_output(), highlight=False)
    if choice.by is not None:
        echo()
        console.print(_build_group_table(choice.by, groups["groups"]))
    if rows:
        echo()
        console.print(_build_table(rows))
        echo(
            f"gymsdk show {shorten_path(stored.source.path)} {rows[0]['task']}:{rows[0]['repeat']} prints a transcript"
        )
    _warn(stored)


def _warn(stored: Run) -> None:
    for problem in stored.queries.list_problems():
        typer.echo(clean(problem), err=True)


def _format_summary(stored: Run, summary: Mapping[str, Any], *, is_chosen: bool) -> Iterator[str]:
    settings = stored.settings
    environments = clean(", ".join(settings.get("environments") or {}))
    yield typer.style(stored.name, bold=True) + (f"   {environments}" if environments else "")
    if settings.get("model"):
        yield f"model     {clean(str(settings['model']))}"
    asked = stored.source.count_inputs()
    of = f" of {asked}" if asked is not None and not is_chosen else ""
    yield f"rollouts  {summary['rollouts']}{of}, {summary['scored']} with a reward"
    if summary["mean"] is not None:
        error = f" ± {summary['stderr']:.3f}" if summary["stderr"] is not None else ""
        yield f"reward    {summary['mean']:.3f}{error}   ({summary['low']:g} to {summary['high']:g})"
        parts = [f"{summary['turns']:.1f} turns", f"{summary['tool_calls']:.1f} tool calls"]
        parts += [f"{summary['tokens']:.0f} tokens"] if summary["tokens"] else []
        parts += [f"{summary['seconds']:.2f} s"] if summary["seconds"] else []
        yield f"mean      {', '.join(parts)}"


def _build_table(rows: list[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    for name in ("id", "reward", "ended", "turns", "tools", "tokens"):
        table.add_column(name, justify="left" if name in {"id", "ended"} else "right", no_wrap=True)
    table.add_column("answer", max_width=24, no_wrap=True, overflow="ellipsis")
    table.add_column("prompt", no_wrap=True, overflow="ellipsis", ratio=1)
    for row in rows:
        reward = "" if row["reward"] is None else f"{row['reward']:g}"
        values = (f"{row['task']}:{row['repeat']}", reward, row["ended"] or row["failure"] or row["outcome"])
        counts = ("" if row[name] is None else str(row[name]) for name in ("turns", "tool_calls", "tokens"))
        texts = (clean(row["answer"] or "").replace("\n", " "), clean(row["prompt"]))
        # Not plain text, in which rich reads square brackets as markup.
        table.add_row(*(Text(value) for value in (*values, *counts, *texts)))
    return table


def _build_group_table(by: str, groups: list[Row]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column(Text(clean(by)))
    for name in ("rollouts", "tasks", "scored", "mean reward"):
        table.add_column(name, justify="right")
    for group in groups:
        mean = "" if group["mean"] is None else f"{group['mean']:.3f}"
        value = "none" if group["value"] is None else clean(str(group["value"]))
        table.add_row(Text(value), *(str(group[name]) for name in ("rollouts", "tasks", "scored")), mean)
    return table


def _show_rollout(stored: Run, name: str, *, json: bool) -> None:
    from gymsdk.runs.schema import NOTE, TAG

    row = stored.queries.find(name)
    if row is None:
        path = shorten_path(stored.source.path)
        raise UsageError(f"{path} has no rollout {name!r}; `gymsdk show {path}` lists some")
    rollout = stored.queries.read(row["id"])
    if json:
        print_json(rollout.line)
        return
    for part in _render_rollout(rollout, row, stored.queries.get_figures(row["id"])):
        echo(part)
    fields = stored.queries.get_fields(row["id"])
    for field in (TAG, NOTE):
        if field in fields:
            echo(f"  {field}: {clean(', '.join(text for text, _ in fields[field]))}")


def _render_rollout(rollout: StoredRollout, row: Row, figures: dict[str, float]) -> Iterator[str]:
    """Yield the parts of a transcript: the conversation, and the result below it."""
    from gymsdk.runs.records import PART

    yield _draw_rule(f"{clean(row['environment'])} {row['task']}:{row['repeat']}")
    yield from _render_items([*rollout.opening, *rollout.output])
    yield _draw_rule()
    if row["reward"] is None:
        reason = f"no reward: {row['failure'] or row['outcome']} at {row['stage'] or '?'}"
        yield typer.style(clean(reason), fg="red", bold=True)
        yield clean(row["message"])
    else:
        parts = ", ".join(
            f"{clean(key.removeprefix(PART))} {value:g}" for key, value in figures.items() if key.startswith(PART)
        )
        yield typer.style(f"reward {row['reward']:g}" + (f" = {parts}" if parts else ""), bold=True)
    for key, value in rollout.verdict.items():
        yield f"  {clean(key)}: {clean(_format_value(value))}"
    yield from _render_record(rollout.record)
    counts = [
        *([f"ended: {row['ended']}"] if row["ended"] else []),
        format_count(row["turns"], "turn"),
        format_count(row["tool_calls"], "tool call"),
    ]
    counts += [f"{row['tokens']} tokens"] if row["tokens"] else []
    counts += [f"{row['seconds']:.2f} s"] if row["seconds"] is not None else []
    yield typer.style(clean(", ".join(counts)), dim=True)


def _render_record(record: EpisodeRecord) -> Iterator[str]:
    """Yield the rewards of the steps, and the calls of models: instructions, last item of the input, and answer."""
    from gymsdk.line import get_object
    from gymsdk.responses import get_input_items

    if record.step_rewards:
        yield f"  rewards of the steps: {', '.join(f'{reward:g}' for reward in record.step_rewards)}"
    if record.left_out:
        yield f"  {format_count(record.left_out, 'call')} of judges or user models left out"
    for call in record.calls:
        stage = f"{call.get('stage')} {call.get('step', '')}".rstrip()
        yield typer.style(clean(f"{call.get('role')} at {stage}, {call.get('seconds')} s"), bold=True)
        request = get_object(call, "request")
        if instructions := request.get("instructions"):
            yield from _render_items([{"role": "instructions", "content": instructions}])
        yield from _render_items(get_input_items(request)[-1:])
        yield from _render_items(get_object(call, "answer").get("output") or [])
        if "error" in call:
            yield _render_text(str(get_object(call, "error").get("message")), fg="red")


def _draw_rule(title: str = "") -> str:
    """Return a line across the console, of characters that its encoding has."""
    stroke = "─" if "utf" in (get_output().encoding or "").lower() else "-"
    return (f"{title} " if title else "").ljust(shutil.get_terminal_size().columns, stroke)


def _render_items(items: list[Item]) -> Iterator[str]:
    """Yield each item of a conversation: a call followed by its output, and every text as it was written."""
    from gymsdk.runs.records import get_reasoning, get_text, is_tool_error
    from gymsdk.types import pair_outputs

    pairs = pair_outputs(items)
    shown = set(pairs.values())
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "function_call":
            call = f"→ {item.get('name')}({_format_arguments(item.get('arguments'))})"
            yield typer.style(clean(call), fg="cyan")
            if index not in pairs:
                yield typer.style("  no output", dim=True)
                continue
            text = get_text(items[pairs[index]].get("output"))
            yield _render_text(text, fg="red" if is_tool_error(text) else "yellow")
        elif kind == "function_call_output":
            if index not in shown:
                yield _render_text(get_text(item.get("output")), fg="yellow")
        elif kind == "reasoning":
            yield _render_text(get_reasoning(item), dim=True, italic=True)
        else:
            role = str(item.get("role") or kind)
            yield typer.style(clean(role), fg="green" if role == "assistant" else None, bold=True)
            yield _render_text(get_text(item.get("content"))) + "\n"


def _render_text(text: str, **style: Any) -> str:
    """Return *text* as it was written, indented; the console breaks long lines."""
    lines = clean(text).split("\n")
    return "\n".join(f"  {typer.style(line, **style)}" if line else "" for line in lines)


def _format_arguments(arguments: object) -> str:
    """Return the arguments of a call as in Python; text that is not the plain JSON of an object stays as it is."""
    from gymsdk import jsonl

    text = arguments if isinstance(arguments, str) else jsonl.dump_portable_json(arguments).decode()
    try:
        values = jsonl.parse_json(text)
    except ValueError:
        return text
    compact = JSON_SPACE.sub(lambda found: found[1] or "", text)
    # A text that says the same in another way, or a key twice, is evidence and must not be rewritten.
    if not isinstance(values, dict) or jsonl.dump_portable_json(values).decode() != compact:
        return text
    return ", ".join(f"{name}={_format_value(value)}" for name, value in values.items())


def _format_value(value: object) -> str:
    from gymsdk import jsonl

    return jsonl.dump_portable_json(value).decode()


def format_count(number: int, noun: str) -> str:
    """Return *number* with the singular or the plural of *noun*."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def clean(text: str) -> str:
    """Return *text* with control characters as escapes, because a transcript could change the terminal with them."""
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(_escape, line)) for line in lines)


def _escape(character: str) -> str:
    is_shown = character in SHOWN_CHARACTERS or unicodedata.category(character) not in ESCAPED_CATEGORIES
    return character if is_shown else character.encode("unicode_escape").decode()
