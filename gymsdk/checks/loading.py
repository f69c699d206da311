"""Checks before any episode: the environment loads, splits have tasks, rows survive JSON, tools are described."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from gymsdk import jsonl
from gymsdk.checks.phases import describe_task
from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.splits import check_overlap
from gymsdk.checks.subject import Subject
from gymsdk.concurrency import ThreadPool
from gymsdk.errors import BadConfig, BadRow
from gymsdk.models.scripted import build
from gymsdk.types import Item, Rollout, Row, Task, extract_text

MAX_FINDINGS = 20
"""How many unreadable rows of one file are reported."""

MAX_DRAWN_ROWS = 100
"""How many rows of a split are drawn if the split has no file."""

FIX_LINE = "fix or remove the line; a run that reaches it stops"

LOAD_SECONDS = 30.0
"""Seconds that loading the environment and drawing its tasks may take."""

FIRST_TASK_SECONDS = 5.0
"""Seconds the first task of a split may take."""

FIX_MISSING_SETTING = "pass the missing settings with --set (in pytest with --gymsdk-set NAME.KEY=VALUE)"


def find_unreadable_rows(subject: Subject) -> list[Finding]:
    """Return the unreadable rows of each split: of a file all, of a generated split the first."""
    if subject.file_tasks is not None:
        return []
    return [finding for split in subject.splits for finding in islice(_find_in_split(subject, split), MAX_FINDINGS)]


def _find_in_split(subject: Subject, split: str) -> Iterator[Finding]:
    path = _find_split_file(subject, split)
    return _read_file(subject, path) if path else _read_drawn(subject, split)


def _find_split_file(subject: Subject, split: str) -> Path | None:
    """Return the file that *split* is read from, or `None` if the environment generates its tasks."""
    plugin = subject.environment.plugin
    home = getattr(plugin, "__file__", None)
    path = Path(home or "").parent / "data" / f"{split}.jsonl"
    return path if home and not hasattr(plugin, "tasks") and path.is_file() else None


def _read_file(subject: Subject, path: Path) -> Iterator[Finding]:
    for number, line in jsonl.read_lines(path):
        location = f"{path.parent.name}/{path.name}:{number}"
        try:
            row = jsonl.parse_row(line, where=location)
        except BadRow as error:
            yield Finding(problem=str(error), fix=FIX_LINE)
            continue
        try:
            subject.environment.read(row)
        except BadRow as error:
            yield Finding(problem=f"{location}: {error}", fix=FIX_LINE)


def _read_drawn(subject: Subject, split: str) -> Iterator[Finding]:
    number = 0
    try:
        for _ in islice(subject.environment.tasks(split, seed=subject.seed), MAX_DRAWN_ROWS):
            number += 1
    except BadRow as error:
        yield Finding(problem=f"row {number + 1} of the split {split!r} cannot be read: {error}")


async def check_loading(subject: Subject, *, seconds: float = LOAD_SECONDS) -> list[Finding]:
    """Return why the environment or its tasks do not load within *seconds* each."""
    # In a thread: an environment that hangs while it loads must not hang the check.
    threads = ThreadPool()
    try:
        environment = await threads.run(lambda: subject.environment, timeout=seconds)
    except TimeoutError:
        return [Finding(problem=f"it did not load within {seconds:g} seconds")]
    except BadConfig as error:
        if subject.settings:
            raise
        return [
            Finding(
                problem=f"it does not load with its defaults: {error}",
                fix=FIX_MISSING_SETTING,
            )
        ]
    try:
        tasks = await threads.run(lambda: subject.tasks, timeout=seconds)
    except TimeoutError:
        text = f"{subject.count} tasks of each split were not drawn within {seconds:g} seconds"
        return [Finding(problem=text, fix="yield tasks one by one as they are made")]
    except BadRow as error:
        return find_unreadable_rows(subject) or [Finding(problem=str(error))]
    if tasks:
        return []
    text = (
        f"none of its splits has a task: {', '.join(environment.splits)}" if environment.splits else "it has no split"
    )
    return [
        Finding(problem=text, fix="write a `tasks` hook, put rows into `data/<split>.jsonl`, or name a file of rows")
    ]


async def check_splits(subject: Subject, *, seconds: float = FIRST_TASK_SECONDS) -> list[Finding]:
    """Return which splits have no name or no task, or take more than *seconds* to yield the first."""
    if not subject.environment.splits:
        raise NotApplicable("it has no splits; it plays files of rows")
    findings = [await _draw_first_task(subject, split, seconds) for split in subject.splits]
    return [finding for finding in findings if finding]


async def _draw_first_task(subject: Subject, split: str, seconds: float) -> Finding | None:
    """Draw the first task of *split* from a new environment and return a finding if it fails."""
    if not split.strip():
        return Finding(problem=f"a split is named {split!r}", fix="give each split a name that is a word")
    started = time.perf_counter()
    # A new environment: one that has drawn the task before may have cached it.
    draw = partial(next, subject.make().tasks(split, seed=subject.seed), None)
    try:
        task = await ThreadPool().run(draw, timeout=LOAD_SECONDS)
    except TimeoutError:
        return Finding(problem=f"the first task of {split!r} did not arrive within {LOAD_SECONDS:g} seconds")
    if task is None:
        return Finding(problem=f"the split {split!r} has no task")
    duration = time.perf_counter() - started
    if duration > seconds:
        return Finding(
            problem=f"the first task of {split!r} took {duration:.1f} seconds, more than the allowed {seconds:g}"
        )
    return None


async def _check_rows(subject: Subject) -> list[Finding]:
    findings = [_check_round_trip(subject, task) for task in subject.tasks]
    return [*find_unreadable_rows(subject), *(finding for finding in findings if finding)]


def _check_round_trip(subject: Subject, task: Task) -> Finding | None:
    """Write *task* as a line, read it back, and return what changed."""
    try:
        row = task.row()
        line = json.dumps(row, allow_nan=False, ensure_ascii=False).encode()
    except Exception as error:  # noqa: BLE001  # serialising an author's field may raise anything
        reason = f"{type(error).__name__}: {error}"
        return Finding(problem=f"a row cannot be written as JSON: {reason}", task=describe_task(task))
    try:
        read_back = subject.environment.read(jsonl.parse_row(line, where="its own row"))
    except BadRow as error:
        return Finding(problem=f"a row that was written cannot be read: {error}", task=describe_task(task))
    if changed := _list_changed_fields(row, read_back.row()) or _list_differing_fields(task, read_back):
        return Finding(
            problem=f"written and read back, {', '.join(changed)} of a row changed", task=describe_task(task)
        )
    return None


def _list_changed_fields(row: Row, read_back: Row) -> list[str]:
    return sorted(key for key in row.keys() | read_back.keys() if row.get(key) != read_back.get(key))


def _list_differing_fields(task: Task, read_back: Task) -> list[str]:
    """Return the declared fields whose values differ although they serialise equally."""
    names = type(read_back).model_fields.keys() - Task.model_fields.keys()
    return sorted(name for name in names if getattr(task, name, None) != getattr(read_back, name))


async def _check_prompts(subject: Subject) -> list[Finding]:
    silent = [task for task in subject.tasks if not _has_content(task.input)]
    async with subject.enter_environment() as environment:
        findings = []
        for task in silent:
            episode = await environment.reset(task, seed=subject.seed)
            if not _has_content(episode.transcript.opening):
                findings.append(
                    Finding(problem="an episode opens without text for the policy", task=str(task.row())[:80])
                )
            await environment.close(episode)
    return findings


def _has_content(items: Sequence[dict[str, object]]) -> bool:
    return any(_is_visible(item.get("content")) for item in items)


def _is_visible(content: object) -> bool:
    """Return whether *content* has text, or a part that is not text."""
    if isinstance(content, list):
        return any(extract_text([part]).strip() or "text" not in part for part in content)
    return isinstance(content, str) and bool(content.strip())


async def _check_verdicts(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment:
        plays = [(name, task) for name in ("oracle", "null") for task in subject.tasks[:2]]
        rollouts = [await subject.play(environment, build(name), task) for name, task in plays]
    errors = ((_find_verdict_error(rollout), rollout) for rollout in rollouts)
    return [
        Finding(problem=wrong, task=describe_task(subject.environment.read(rollout.row)))
        for wrong, rollout in errors
        if wrong
    ]


def _find_verdict_error(rollout: Rollout) -> str | None:
    """Return the error of the verdict of *rollout*, or `None`."""
    failure = rollout.failure
    if failure is not None:
        # The environment rejects a verdict that is invalid or that JSON cannot represent.
        return failure.message if (failure.stage, failure.kind) == ("verify", "bad_answer") else None
    assert rollout.verdict is not None, "a scored rollout has a verdict"
    try:
        json.dumps(rollout.verdict.model_dump(mode="json"), allow_nan=False)
    except ValueError as error:
        return f"a verdict cannot be written as JSON: {type(error).__name__}: {error}"
    return None


LOAD_CHECK = Check(
    id="runtime.load",
    requirement="the environment loads with the given settings, and yields its tasks within seconds",
    why="an environment that does not load cannot be played, and no other check can run",
    fix="follow the message; `gymsdk info NAME` describes the environment",
    run=check_loading,
    seconds=70.0,
)


TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
"""The tool names that providers accept."""

JSON_TYPES = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})


async def _check_schemas(subject: Subject) -> list[Finding]:
    offered = _collect_tools(subject)
    if not offered:
        raise NotApplicable("it has no tools")
    return [
        Finding(problem=f"tool {name!r}: {wrong}")
        for name, tool in offered.items()
        for wrong in _list_tool_errors(tool)
    ]


def _collect_tools(subject: Subject) -> dict[str, Item]:
    """Return the schemas of the environment's tools and of the tools that its rows list, by name."""
    own_tools = {name: tool.schema for name, tool in subject.environment.tools.items()}
    listed = (tool for task in subject.tasks for tool in task.responses_create_params.get("tools") or [])
    return {str(tool.get("name")): tool for tool in listed} | own_tools


def _list_tool_errors(tool: Item) -> Iterator[str]:
    if not TOOL_NAME.fullmatch(str(tool.get("name"))):
        yield "its name must be 1 to 64 letters, digits, `_` and `-`"
    shape = tool.get("parameters")
    if not isinstance(shape, dict) or shape.get("type", "object") != "object":
        yield "its parameters are not the schema of an object"
        return
    yield from _list_schema_errors(shape, shape, "parameters")
    if tool.get("strict"):
        yield from _list_strict_errors(shape, "parameters")


def _list_schema_errors(node: object, whole: Item, place: str) -> Iterator[str]:
    """Yield why *node*, at *place* of the schema *whole*, is not valid JSON Schema."""
    if isinstance(node, bool):
        return
    if not isinstance(node, dict):
        yield f"{place} is {node!r} instead of a schema"
        return
    kinds = node.get("type", [])
    if not set(kinds if isinstance(kinds, list) else [kinds]) <= JSON_TYPES:
        yield f"{place} has the type {kinds!r}, which JSON Schema does not define"
    if "enum" in node and not (isinstance(node["enum"], list) and node["enum"]):
        yield f"{place} has an `enum` without values"
    if "$ref" in node and not _resolves(str(node["$ref"]), whole):
        yield f"{place} refers to {node['$ref']!r}, which does not exist"
    required = set(node.get("required") or [])
    if not required <= set(node.get("properties", required)):
        yield f"{place} requires a property that it does not define"
    for key, subschema in _iter_subschemas(node):
        yield from _list_schema_errors(subschema, whole, f"{place}.{key}")


def _iter_subschemas(node: Item) -> Iterator[tuple[str, object]]:
    """Yield the direct subschemas of *node* with their places."""
    for group in ("properties", "$defs"):
        children = node.get(group, {})
        yield from children.items() if isinstance(children, dict) else [(group, children)]
    for group in ("anyOf", "oneOf", "allOf", "prefixItems"):
        yield from ((f"{group}.{number}", subschema) for number, subschema in enumerate(node.get(group, [])))
    for key in ("items", "additionalProperties"):
        if key in node:
            yield key, node[key]


def _resolves(reference: str, whole: Item) -> bool:
    node: object = whole
    for word in reference.removeprefix("#").strip("/").split("/") if reference != "#" else []:
        node = node.get(word) if isinstance(node, dict) else None
    return node is not None


def _list_strict_errors(node: object, place: str) -> Iterator[str]:
    """Yield why a provider rejects a schema that is marked as strict."""
    if not isinstance(node, dict):
        return
    if "properties" in node and node.get("additionalProperties") is not False:
        yield f"{place} is strict but lacks `additionalProperties: false`"
    if missing := sorted(set(node.get("properties", {})) - set(node.get("required", []))):
        yield f"{place} is strict but does not require {', '.join(missing)}"
    for key, subschema in _iter_subschemas(node):
        yield from _list_strict_errors(subschema, f"{place}.{key}")


async def _check_descriptions(subject: Subject) -> list[Finding]:
    problems = [
        f"the tool {name!r} has no description"
        for name, tool in _collect_tools(subject).items()
        if not _read_description(tool)
    ]
    problems += [
        wrong for tool in subject.environment.tools.values() for wrong in _list_undescribed_arguments(tool.schema)
    ]
    problems += [f"the setting {name!r} has no description" for name in _list_undescribed_settings(subject)]
    return [Finding(problem=problem) for problem in problems]


def _read_description(node: Item) -> bool:
    return bool(str(node.get("description") or "").strip())


def _list_undescribed_arguments(tool: Item) -> Iterator[str]:
    """Yield the arguments that neither their own nor the tool's description mentions."""
    described_words = _extract_words(str(tool.get("description")))
    for name, node in tool["parameters"].get("properties", {}).items():
        if not _read_description(node) and not set(name.lower().split("_")) & described_words:
            yield f"the argument {name!r} of the tool {tool['name']!r} has no description"


def _list_undescribed_settings(subject: Subject) -> Iterator[str]:
    """Yield the settings that neither their own description nor the class's docstring mentions."""
    kind = type(subject.environment.config)
    described_words = set(re.findall(r"\w+", kind.__doc__ or ""))
    for name, field in kind.model_fields.items():
        if not field.description and name not in described_words:
            yield name


def _extract_words(text: str) -> set[str]:
    """Return the words of *text* in singular and plural form."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {form for word in words for form in (word, word.removesuffix("s"), f"{word}s")}


CHECKS: tuple[Check, ...] = (
    LOAD_CHECK,
    Check(
        id="runtime.splits",
        requirement="every split has a name and tasks, and its first task arrives within seconds",
        why="a run waits until the first task arrives, and a split without tasks ends it",
        fix="yield tasks lazily, without making or reading all of them first; leave out splits without tasks",
        run=check_splits,
    ),
    Check(
        id="runtime.rows",
        requirement="a task's row survives being written to JSON and read back unchanged",
        why="rows travel as JSON lines; a field that changes on the way is graded differently",
        fix="give the task's fields types that JSON has, and validators that leave their own output as it is",
        run=_check_rows,
    ),
    Check(
        id="runtime.prompts",
        requirement="every episode opens with text for the policy",
        why="a policy that sees nothing can only guess, and its reward teaches nothing",
        fix="give the row a prompt with `Task.ask`, or have `reset` open with messages",
        run=_check_prompts,
    ),
    Check(
        id="runtime.verdicts",
        requirement="a verdict's fields can be written as JSON",
        why="a rollout's line contains them; a verdict that cannot be written is lost, and the rollout with it",
        fix="give the verdict's fields types that JSON has, and finite numbers",
        run=_check_verdicts,
    ),
    Check(
        id="semantic.split_overlap",
        requirement="no row is in two splits",
        why="a policy that has trained on a row of the test split is not tested by it",
        fix="derive the generator from split and seed, as in `random.Random(f'{split}:{seed}')`, and keep the splits'"
        " tasks apart; another number or id does not make another task",
        run=check_overlap,
    ),
    Check(
        id="runtime.tool_schemas",
        requirement="every tool's schema is valid JSON Schema, and a schema marked as strict is strict",
        why="a provider rejects the whole request if one schema is invalid: every episode fails at its first turn",
        fix="let the tool's annotations generate its schema; in rows that list tools, write schemas in strict form",
        run=_check_schemas,
    ),
    Check(
        id="runtime.descriptions",
        requirement="every tool, argument and setting has a description",
        why="a policy knows a tool, and a user knows a setting, only by its description",
        fix="give the tool a docstring, an argument `Annotated[..., Field(description=...)]` or a word in that"
        " docstring, a setting `Field(description=...)` or a word in its class's",
        run=_check_descriptions,
    ),
)
