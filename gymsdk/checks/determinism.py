"""Check that results repeat: with the same seed, in another interpreter, in a replay, in a second `verify`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from gymsdk import jsonl, responses
from gymsdk.checks.attack import build_policy, format_answer
from gymsdk.checks.phases import (
    Performance,
    Script,
    build_scripts,
    describe_task,
    draw_tasks,
    sample_tasks,
    serialize_verdict,
)
from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.splits import is_numbering_field
from gymsdk.checks.subject import Plain, Play, RecordingModel, Subject, find_difference, to_plain
from gymsdk.environment import Environment
from gymsdk.episode import EpisodeRunner
from gymsdk.errors import BrokenEnvironment, EpisodeError
from gymsdk.interpreter import build_code_command
from gymsdk.models.scripted import ScriptedModel
from gymsdk.responses import iter_turn_spans
from gymsdk.types import Budget, Episode, Item, Playable, Row, Task

INTERPRETER_SECONDS = 45.0
"""Time limit of the other interpreter."""

PROGRAM = """
import asyncio, os, sys
report = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
from gymsdk.checks.determinism import draw_and_open
from gymsdk.jsonl import parse_json

request = parse_json(sys.stdin.buffer.read())
result = asyncio.run(draw_and_open(**request)).model_dump_json()
report.write(result.encode())
report.flush()
os._exit(0)
"""
"""It writes the result to a descriptor that only it knows: the environment's own output goes to standard error."""

MAX_ROWS = 6
"""The maximum number of tasks of a split to compare."""

MAX_TASKS = 3
"""The maximum number of tasks to play."""

MAX_OPENED = 2
"""The maximum number of tasks of a split whose episodes another interpreter opens."""

MAX_SEEDS = 24
"""The number of seeds whose first tasks are compared with each other, and with as many tasks of one seed."""


@dataclass(frozen=True, slots=True)
class ProcessResult:
    """The exit code of a program, its standard output, and the last line of its standard error."""

    code: int
    output: bytes
    last_error_line: str


async def run_program(
    program: str,
    *arguments: str,
    seconds: float,
    stdin: bytes = b"",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> ProcessResult:
    """Run *program* with *stdin* as its standard input. Raises `TimeoutError` after *seconds*."""
    process = await asyncio.create_subprocess_exec(
        *build_code_command(program, *arguments),
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(seconds):
            output, errors = await process.communicate(stdin)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None, "the process has ended"
    return ProcessResult(process.returncode, output, errors.decode(errors="replace").strip().rpartition("\n")[2])


class RowSample(BaseModel):
    """The first rows of a split, and the opening items of the episodes of some of them."""

    model_config = ConfigDict(frozen=True)

    rows: list[Row]
    openings: list[list[Item]] = []


async def draw_and_open(
    *, name: str, settings: dict[str, object], split: str, seed: int, count: int, opened: int
) -> RowSample:
    """Draw *count* rows of *split* in this interpreter and open the first *opened* of them."""
    from gymsdk.plugins.registry import load

    subject = Subject(name, lambda: load(name, **settings), seed=seed, count=count, split=split)
    async with subject.enter_environment() as environment:
        openings = [await read_opening(environment, task, seed) for task in subject.tasks[:opened]]
    return RowSample.model_validate({"rows": [to_plain(task.row()) for task in subject.tasks], "openings": openings})


async def read_opening(environment: Environment, task: Task, seed: int) -> Plain:
    """Return the opening items of an episode of *task*, or its failure, as plain JSON."""
    runner = EpisodeRunner(environment)
    try:
        return to_plain((await runner.open(task, seed=seed)).transcript.opening)
    except EpisodeError as error:
        return [{"failure": error.kind}]
    finally:
        await runner.close()


async def draw_in_new_interpreter(
    subject: Subject, split: str, *, seed: int, count: int, opened: int = 0, hash_seed: int = 1
) -> RowSample:
    """Draw rows of *split* in a new interpreter.

    Raises:
        NotApplicable: The environment is not installed, or its settings cannot be written as JSON.
        BrokenEnvironment: The environment fails in the new interpreter.
    """
    request = _build_request(subject, split=split, seed=seed, count=count, opened=opened)
    # With another hash seed than that of this process, sets of strings are iterated in another order.
    variables = {"PYTHONHASHSEED": str(hash_seed)}
    result = await run_program(PROGRAM, seconds=INTERPRETER_SECONDS, stdin=request, environment=variables)
    if result.code:
        raise BrokenEnvironment(f"a new process cannot draw its rows: {result.last_error_line}")
    if not result.output:
        raise BrokenEnvironment("a new process cannot draw its rows: the environment ends the process")
    return RowSample.model_validate_json(result.output)


def _build_request(subject: Subject, **parameters: str | int) -> bytes:
    if subject.entry is None:
        raise NotApplicable("the environment is not installed, so no other process can load it")
    try:
        return jsonl.dump_json({"name": subject.name, "settings": dict(subject.settings), **parameters})
    except (TypeError, ValueError):
        raise NotApplicable("its settings cannot be written as JSON, so another process cannot receive them") from None


async def _check_determinism(subject: Subject) -> list[Finding]:
    findings: list[Finding] = []
    # A `lifespan` may start a server, so all comparisons share two environments.
    async with subject.enter_environment() as environment, subject.enter_environment() as other:
        # The rows of a file do not depend on a seed.
        for split in subject.environment.splits if subject.file_tasks is None else ():
            findings += await _check_rows(subject, split, environment)
            findings += _find_constant_draws(subject, split)
        return findings + await _check_plays(subject, environment, other)


async def _check_rows(subject: Subject, split: str, entered: Environment) -> list[Finding]:
    expected = _draw_rows(subject.make(), split, subject.seed)
    about = f"split {split!r} with seed {subject.seed}, drawn"
    # The rows of a seed must not depend on the rows that the environment has drawn before.
    used_environment = subject.make()
    _draw_rows(used_environment, split, subject.seed + 1)
    for when, environment in (("a second time", subject.make()), ("after another seed", used_environment)):
        if change := find_difference(expected, _draw_rows(environment, split, subject.seed), "row"):
            return [Finding(problem=f"{about} {when}: {change}")]
    change = await _compare_interpreters(subject, split, expected, entered)
    fix = "sort sets before you draw from them or print them, and seed with a string or a number, never with hash()"
    return [Finding(problem=f"{about} in another interpreter: {change}", fix=fix)] if change else []


def _find_constant_draws(subject: Subject, split: str) -> list[Finding]:
    """Find fields that vary between tasks but are the same in the first task of every seed."""
    environment = subject.make()
    rows_of_one_seed = [task.row() for task in draw_tasks(environment, split, subject.seed, MAX_SEEDS)]
    first_rows = [task.row() for seed in range(MAX_SEEDS) for task in draw_tasks(environment, split, seed, 1)]
    if len(first_rows) < MAX_SEEDS or all(row == first_rows[0] for row in first_rows):
        # There are too few tasks, or the split does not depend on the seed.
        return []
    fix = "if kinds of tasks alternate, let the seed choose which kind comes first"
    findings = []
    for key in rows_of_one_seed[0]:
        first_values = _list_values(first_rows, key)
        # A field with nearly as many values as tasks names no kind of task.
        varies = 1 < len(_list_values(rows_of_one_seed, key)) <= MAX_SEEDS // 2
        if varies and len(first_values) == 1 and not is_numbering_field(key):
            problem = f"split {split!r}: {key!r} is {first_values[0]!r} in the first task of every seed"
            findings.append(Finding(problem=problem, fix=fix))
    return findings


def _list_values(rows: list[Row], key: str) -> list[str | int | bool]:
    """Return the distinct values of a row's field, if they can name a kind of task."""
    return list(dict.fromkeys(row[key] for row in rows if isinstance(row.get(key), (str, int, bool))))


async def _compare_interpreters(
    subject: Subject, split: str, expected: list[Plain], entered: Environment
) -> str | None:
    """Return where another interpreter draws *split* differently or opens its first tasks differently."""
    try:
        other = await draw_in_new_interpreter(subject, split, seed=subject.seed, count=len(expected), opened=MAX_OPENED)
    except NotApplicable:
        return None
    if change := find_difference(expected, to_plain(other.rows), "row"):
        return change
    tasks = draw_tasks(entered, split, subject.seed, MAX_OPENED)
    openings = [await read_opening(entered, task, subject.seed) for task in tasks]
    return find_difference(openings, to_plain(other.openings), "opening")


def _draw_rows(environment: Environment, split: str, seed: int) -> list[Plain]:
    return [to_plain(task.row()) for task in draw_tasks(environment, split, seed, MAX_ROWS)]


async def _check_plays(subject: Subject, environment: Environment, other: Environment) -> list[Finding]:
    tasks = await subject.count_affordable(environment, MAX_TASKS, episodes=8)
    findings = [
        await _compare_replay(environment, other, script)
        for script in await build_scripts(subject, environment, tasks=tasks)
    ]
    return [finding for finding in findings if finding]


async def _compare_replay(environment: Environment, other: Environment, script: Script) -> Finding | None:
    first, repeated = [await Performance(script, environment).play_all() for _ in range(2)]
    in_other = await Performance(script, other).play_all()
    for where, second in (("again", repeated), ("in a new environment", in_other)):
        if change := find_difference(first, second):
            return Finding(problem=f"{script.title}, played {where}: {change}")
    return None


async def _check_replay(subject: Subject) -> list[Finding]:
    async with subject.enter_environment() as environment, subject.enter_environment() as other:
        tasks = await subject.count_affordable(environment, MAX_TASKS, episodes=6)
        scripts = await build_scripts(subject, environment, tasks=tasks)
        changes = [(script.title, await _find_difference(environment, other, script)) for script in scripts]
    return [Finding(problem=f"{title}, replayed in a new environment: {change}") for title, change in changes if change]


async def _find_difference(environment: Environment, other: Environment, script: Script) -> str | None:
    first = Performance(script, environment)
    try:
        episode = await first.play_until_verdict()
        state = to_plain(episode.state) if episode else None
        phase = await first.advance()
    finally:
        await first.close()
    if episode is None or phase != "verify" or first.rollout.verdict is None:
        # Other checks report a broken episode; there is nothing to replay.
        return None
    if len(list(iter_turn_spans(episode.transcript.items))) < len(first.answers):
        # A step without an answer leaves two replies in a row, which a transcript cannot tell apart.
        return None
    return find_difference(
        {"state": state, "verdict": serialize_verdict(first.rollout.verdict)}, await _rebuild_episode(other, episode)
    )


async def _rebuild_episode(other: Environment, episode: Episode) -> Plain:
    """Return the state and the verdict of *episode*'s transcript, replayed in an *other* environment."""
    replayed = await other.replay(episode.task, episode.transcript.items, seed=episode.seed)
    replayed.transcript.ended = episode.transcript.ended
    try:
        return {"state": to_plain(replayed.state), "verdict": serialize_verdict(await other.verify(replayed))}
    finally:
        # Another check reports errors of `close`.
        with suppress(EpisodeError):
            await other.close(replayed)


MAX_REVERIFIED_TASKS = 4
"""How many tasks have their transcripts judged again."""

FIX_MUTATION = "let `verify` only read: copy what it sorts, fills or pops, and keep counters in the verdict"
FIX_RANDOMNESS = "use no randomness, clock or counters in `verify`; seed its random choices by the task"
FIX_SHARED_STATE = (
    "let `verify` depend on nothing but its arguments: no module variables, no cache that changes an answer"
)

WRONG_TURNS = [[responses.build_message(format_answer("17"), id="msg_0")]]
"""A reply that is hardly ever right."""


async def _check_verifier(subject: Subject) -> list[Finding]:
    # Draw new tasks: a verifier that changes its task may have changed these in an earlier check.
    redrawn = replace(subject)
    async with subject.enter_environment() as environment, subject.enter_environment() as other:
        tasks = sample_tasks(
            redrawn.tasks, await subject.count_affordable(environment, MAX_REVERIFIED_TASKS, episodes=4)
        )
        if not tasks:
            raise NotApplicable("the environment has no tasks")
        plays = [play for task in tasks for play in await _play_right_and_wrong(subject, environment, task)]
        if not plays:
            raise NotApplicable("no play of a task was scored, so there is no verdict to compare")
        findings = [await _judge_repeatedly(subject, environment, other, *play) for play in plays]
    # The first finding of each kind, which has a fix of its own.
    return list({finding.fix: finding for finding in reversed(findings) if finding}.values())


async def _play_right_and_wrong(
    subject: Subject, environment: Environment, task: Task
) -> list[tuple[Task, Play, Budget]]:
    """Play *task* rightly and wrongly, and return the plays that were scored."""
    # Copies: a verifier that changes its task must not change it for the second play.
    right = await subject.play_oracle(environment, task.model_copy(deep=True))
    model = RecordingModel(ScriptedModel("wrong", build_policy(WRONG_TURNS)))
    rollout = await subject.play(environment, model, task.model_copy(deep=True), budget=subject.brief_budget)
    plays = ((right, subject.budget), (Play(tuple(model.turns), rollout), subject.brief_budget))
    return [(task, play, budget) for play, budget in plays if play.rollout.outcome == "scored"]


async def _judge_repeatedly(
    subject: Subject, environment: Environment, other: Environment, task: Task, play: Play, budget: Budget
) -> Finding | None:
    script = Script("again", task.model_copy(deep=True), subject.seed, play.turns, budget)
    performance = Performance(script, environment)
    try:
        episode = await performance.play_until_verdict()
        # Other checks report tasks that cannot be played.
        return (
            await _find_change(environment, other, episode, serialize_verdict(play.rollout.verdict))
            if episode
            else None
        )
    finally:
        await performance.close()


async def _find_change(environment: Environment, other: Environment, episode: Episode, played: Plain) -> Finding | None:
    """Return what changes in *episode* or in its verdict when `verify` judges it repeatedly."""
    name = describe_task(episode.task)
    before, copies = (
        _dump_episode(episode),
        [_copy_episode(episode, target) for target in (environment, environment, other)],
    )
    first = await _ask_verify(environment, episode)
    if changed := find_difference(before, _dump_episode(episode)):
        return Finding(problem=f"`verify` changes its arguments: {changed}", task=name, fix=FIX_MUTATION)
    second, third, in_other = [await _ask_verify(copy.environment, copy) for copy in copies]
    verdicts = {
        "when one transcript is judged again": (first, second, FIX_RANDOMNESS),
        "when one transcript is judged a third time": (second, third, FIX_RANDOMNESS),
        "between two plays of the same turns": (played, first, FIX_SHARED_STATE),
        "between two environments that judge one transcript": (first, in_other, FIX_SHARED_STATE),
    }
    return _find_verdict_difference(name, verdicts)


def _find_verdict_difference(task: str, verdicts: dict[str, tuple[Plain, Plain, str]]) -> Finding | None:
    for when, (first, another, fix) in verdicts.items():
        if differs := find_difference(first, another):
            return Finding(problem=f"the verdict changes {when}: {differs}", task=task, fix=fix)
    return None


async def _ask_verify(environment: Playable, episode: Episode) -> Plain:
    try:
        return serialize_verdict(await environment.verify(episode))
    except EpisodeError as error:
        return {"failure": f"{error.kind}: {error}"}


def _copy_episode(episode: Episode, environment: Environment) -> Episode:
    try:
        state, transcript = deepcopy(episode.state), deepcopy(episode.transcript)
    except Exception:  # noqa: BLE001  # an author's state may hold anything
        raise NotApplicable("its state cannot be copied, so it cannot be judged twice") from None
    task = episode.task.model_copy(deep=True)
    return replace(episode, environment=environment, state=state, transcript=transcript, task=task)


def _dump_episode(episode: Episode) -> Plain:
    """Return everything that `verify` could change, as plain JSON."""
    transcript = episode.transcript
    return {
        "state": to_plain(dict(episode.state) | (episode.state.__pydantic_private__ or {})),
        "transcript": to_plain([transcript.opening, transcript.items, transcript.ended]),
        "task": to_plain(episode.task),
        "row": to_plain(episode.row),
    }


CHECKS: tuple[Check, ...] = (
    Check(
        id="runtime.seed_control",
        requirement="the same seed gives the same tasks, openings, answers and verdicts",
        why="a run that cannot be repeated cannot be debugged, resumed or compared",
        fix="draw everything from random.Random of the hook's `split` and `seed`, nothing from the global generators, "
        "the clock or the order of a set, and keep nothing in the module between episodes",
        run=_check_determinism,
    ),
    Check(
        id="semantic.replayability",
        requirement="replaying a transcript rebuilds the same state and the same verdict",
        why="trainers send transcripts to be graded without the episode; the host rebuilds its state by replaying "
        "the calls",
        fix="let `reset` and `step` depend on the task, the seed and the actions alone, and keep everything that "
        "`verify` needs in the state or the transcript",
        run=_check_replay,
    ),
    Check(
        id="semantic.verifier_determinism",
        requirement="`verify` gives the same verdict for the same transcript, and changes nothing that it receives",
        why="a reward that changes without a reason is noise in training, and no result can be reproduced",
        fix=FIX_RANDOMNESS,
        run=_check_verifier,
    ),
)
