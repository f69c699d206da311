"""Carry out a run: from the plan to the finished folder with its metrics."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Container,
    Iterator,
    Mapping,
)
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from gymsdk.client import UnknownServer
from gymsdk.convert.trajectory import build_trajectory, get_task_name
from gymsdk.environment import Environment
from gymsdk.errors import BadOutput, BadRow, Failed, ModelLost, UsageError
from gymsdk.http import client
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, TRAJECTORY, Key, build_line, get_agent_name, get_environment_name
from gymsdk.memory import collect_rarely
from gymsdk.models import registry as models
from gymsdk.plugins import registry
from gymsdk.rollouts.folder import RunFolder, RunProgress
from gymsdk.rollouts.inputs import ROWS_BEFORE_START, RunInputs
from gymsdk.rollouts.jobs import (
    CircuitBreaker,
    Job,
    PlayedJob,
    build_failed_rollout,
    build_input_row,
)
from gymsdk.rollouts.plan import (
    EARLIER_SAMPLING,
    SAMPLING_KEY,
    Plan,
    add_earlier_sampling,
    began_with_fixed_sampling,
    build_settings,
    describe_host,
    describe_sampling,
    describe_start,
    list_code_differences,
    list_differences,
)
from gymsdk.rollouts.players import LocalPlayer, Player, collect
from gymsdk.rollouts.remote import HeadServers, RemoteEnvironmentMetrics, RemotePlayer, Wanted, fetch_servers
from gymsdk.rollouts.settings import RunLimits
from gymsdk.rollouts.summary import MetricsSource, build_summaries, iter_metrics_json
from gymsdk.rollouts.tasks import (
    NamedRows,
    UnknownAgent,
    check_one_source,
    describe_shortages,
    find_index_fields,
    has_agents,
    list_wanted,
    read_file,
    read_file_for_servers,
    read_splits,
)
from gymsdk.sockets import count_affordable, raise_open_file_limit
from gymsdk.types import Failure, Model, Row
from gymsdk.working_folder import shorten_path


async def play_missing(
    folder: RunFolder,
    player: Player,
    *,
    inputs: RunInputs,
    done: Container[Key],
    concurrency: int,
    report: Callable[[PlayedJob], None],
    trajectories: bool = False,
    prepare: Callable[[AsyncIterator[Job]], AsyncIterator[Job]] = aiter,
) -> None:
    """Play the rollouts that *folder* lacks.

    Args:
        folder: The run's folder.
        player: Plays the jobs.
        inputs: The rows of the run.
        done: The keys of the rollouts that are finished.
        concurrency: The number of episodes in flight.
        report: Called with each finished rollout after its line is on disk.
        trajectories: Whether each line gets NeMo Gym's `ng_trajectory`.
        prepare: Changes the jobs before they are played.
    """
    missing = prepare(inputs.iter_jobs(done=done))
    async with player.open(), aclosing(collect(missing, player, concurrency=concurrency)) as ends:
        async for played in ends:
            report(write_result(folder, played, trajectories=trajectories))


def write_result(folder: RunFolder, played: PlayedJob, *, trajectories: bool = False) -> PlayedJob:
    """Write a finished rollout to the folder; return it as written: as a failure if JSON cannot hold it."""
    try:
        _keep(folder, played, trajectories=trajectories)
    except (TypeError, ValueError, RecursionError) as error:
        # A verdict or a response may hold a value that JSON cannot express; no part of it has been written then.
        failure = Failure(stage="verify", kind="bad_answer", message=f"the rollout cannot be written as JSON: {error}")
        left = build_failed_rollout(played.job, played.rollout.seed, failure, played.rollout.usage)
        played = PlayedJob(played.job, left, played.attempts)
        _keep(folder, played)
    return played


def _keep(folder: RunFolder, played: PlayedJob, *, trajectories: bool = False) -> None:
    key, rollout = played.job.key, played.rollout
    line = build_line(rollout, key, attempts=played.attempts, digest=played.job.digest)
    if trajectories and rollout.failure is None:
        name = get_task_name(rollout.row, key[0])
        line[TRAJECTORY] = build_trajectory(rollout, task_id=name, rollout_id=f"{key[0]}-{key[1]}")
    folder.append(line, failed=rollout.failure is not None)


DEFAULT_TASKS = 100
"""How many tasks of a split are played without --limit: the split may be endless."""


class RunReporter(Protocol):
    """Receives the progress of a run."""

    def log(self, sentence: str) -> None:
        """Receive a message for the user."""

    def start(self, *, total: int, progress: RunProgress) -> None:
        """Receive the total number of rollouts, and how far an earlier run of the same plan has come.

        While the run still computes its rows, the total is what the plan asks for.
        """

    def set_total(self, total: int) -> None:
        """Receive the total number of rollouts once the run has computed all rows."""

    def finish_job(self, played: PlayedJob) -> None:
        """Receive a finished rollout, which is on disk by now."""


@dataclass(frozen=True, slots=True)
class Run:
    """A plan, the folder for its output, and how to treat an earlier run in the folder.

    Attributes:
        plan: What to play.
        output: The folder.
        resume: Whether to continue the run in the folder.
        overwrite: Whether to replace the run in the folder.
        force: Whether to continue a run although code has changed; run.json then names the differences.
        limits: How the run is executed.
        model: The model object, if the caller has created the model that the plan names.
        trajectories: Whether each line gets NeMo Gym's `ng_trajectory`.
    """

    plan: Plan
    output: Path
    resume: bool = False
    overwrite: bool = False
    force: bool = False
    limits: RunLimits = field(default_factory=RunLimits)
    model: Model | None = None
    trajectories: bool = False


@dataclass(frozen=True, slots=True)
class PlayerSetup:
    """The participants of a run: the environments loaded here, what plays the jobs, and the servers or the model."""

    environments: Mapping[str, Environment]
    player: Player
    served: HeadServers | None = None
    model: Model | None = None


async def execute(run: Run, watch: RunReporter) -> list[Row]:
    """Play *run* to its end.

    Returns:
        The metrics of each environment, without those of each task, which are in `metrics.json`.

    Raises:
        UsageError: The plan cannot be played; nothing has been written.
        ModelLost: The model or the servers do not answer any more.
    """
    _check_options(run)
    try:
        cast = await _choose_player(run)
        # The metrics of a run with many rollouts would trigger full garbage collections, too.
        with RunFolder(run.output) as folder, collect_rarely():
            inputs = await _prepare(folder, run, watch, cast)
            await _complete(folder, run, watch, cast, inputs)
            # Each connection that closes while a `metrics` hook computes in a thread would stop the event loop.
            await client.close_idle_connections()
            sources = await asyncio.to_thread(_list_metrics_sources, folder, cast)
            summaries = await build_summaries(folder, sources)
            await folder.write_metrics(iter_metrics_json(summaries))
            return [summary.metrics for summary in summaries]
    finally:
        await client.aclose()


async def check(run: Run, *, is_served: bool = False) -> None:
    """Check *run* before a cluster or servers start for it; `execute` still checks what depends on these.

    Args:
        run: The run.
        is_served: Whether servers that do not run yet will play the run. Their settings, which a resumed run must
            share, are not known yet.

    Raises:
        UsageError: The plan cannot be played; nothing has been written.
    """
    _check_options(run)
    try:
        cast = await _choose_player(run)
        with RunFolder(run.output) as folder:
            if is_served and run.resume and folder.can_resume:
                return
            _, stored, _ = await _check_folder(folder, run, cast, _ignore)
            if stored is None:
                count = None if run.plan.tasks else ROWS_BEFORE_START
                rows = itertools.islice(_build_inputs(run.plan, _ignore, cast), count)
                await asyncio.to_thread(deque, rows, 0)
    finally:
        await client.aclose()


def _ignore(_: str) -> None:
    """Log nothing."""


def _check_options(run: Run) -> None:
    if run.resume and run.overwrite:
        raise UsageError("--resume continues the run in the folder, --overwrite replaces it; choose one of them")
    if run.force and not run.resume:
        raise UsageError("--force continues a run although code has changed; pass --resume too, or leave it out")
    check_one_source(run.plan.tasks, run.plan.split)


async def _check_tokens(model: Model) -> None:
    """Raise `UsageError` if token ids are wanted and the model's server returns none."""
    check_tokens = getattr(model, "check_tokens", None)
    if check_tokens is None:
        return
    try:
        await check_tokens()
    except Failed as error:
        # A server that does not answer yet is waited for while the run plays.
        if error.kind == "model_no_token_ids":
            raise UsageError(str(error)) from error


async def _choose_player(run: Run) -> PlayerSetup:
    plan, pace = run.plan, run.limits
    if plan.head is None:
        loaded = _load_environments(plan)
        # Loading the environments and building the model may each import many modules. Other tasks run in between.
        await asyncio.sleep(0)
        model = run.model or models.model(plan.model or "", timeout=pace.timeout, **plan.model_options)
        await _check_tokens(model)
        player = LocalPlayer(loaded, model, plan.seed, plan.budget, pace.attempts)
        return PlayerSetup(loaded, player, model=model)
    loaded = {} if plan.tasks else _load_environments(plan)
    # In a thread, and once for all polls of the head: a line may be long.
    wanted = await asyncio.to_thread(_list_wanted, plan)
    head_servers = await fetch_servers(plan.head, lambda servers: has_agents(servers, wanted))
    head_servers.check_environments(list(loaded))
    seconds = plan.budget.seconds + pace.timeout
    delivery = RemotePlayer(head_servers.build_agent_client(seconds), plan.seed, plan.budget, pace.attempts)
    return PlayerSetup(loaded, delivery, head_servers)


def _list_wanted(plan: Plan) -> list[Wanted]:
    names = list(plan.environments)
    if plan.tasks is None:
        return [(name, name) for name in names]
    return list_wanted(names, plan.tasks, limit=plan.limit, agent=plan.agent)


def _load_environments(plan: Plan) -> dict[str, Environment]:
    return {name: registry.load(name, **given) for name, given in plan.environments.items()}


def _list_metrics_sources(folder: RunFolder, cast: PlayerSetup) -> dict[str, MetricsSource]:
    """Return what computes the metrics of the folder's rollouts, by environment."""
    measured: dict[str, MetricsSource] = dict(cast.environments)
    for row in folder.read_inputs() if cast.served else ():
        name, played_by = get_environment_name(row), get_agent_name(row)
        if cast.served and name is not None and played_by is not None and name not in measured:
            measured[name] = RemoteEnvironmentMetrics(name, played_by, cast.served.client)
    return measured


async def _complete(folder: RunFolder, run: Run, watch: RunReporter, cast: PlayerSetup, inputs: RunInputs) -> None:
    progress = await asyncio.to_thread(folder.read_progress)
    # What the plan asks for, until all rows are known: an environment may have fewer.
    planned = len(run.plan.environments) * (run.plan.limit or DEFAULT_TASKS) * run.plan.repeats
    watch.start(total=inputs.count if inputs.is_complete else planned, progress=progress)
    breaker = CircuitBreaker(scored=progress.scored)

    def report_played(played: PlayedJob) -> None:
        watch.finish_job(played)
        breaker.record(played.rollout)

    player = cast.player
    concurrency = _limit_concurrency(run.limits.concurrency, player, watch)
    is_earlier = _sends_earlier_sampling(folder.read_about(), run.plan, cast)
    try:
        async with inputs.write_rest(watch.set_total):
            await play_missing(
                folder,
                player,
                inputs=inputs,
                done=progress.done,
                concurrency=concurrency,
                report=report_played,
                trajectories=run.trajectories,
                prepare=partial(add_earlier_sampling, model=cast.model) if is_earlier else aiter,
            )
    except ModelLost as error:
        raise ModelLost(
            f"{error}; the finished rollouts are in {shorten_path(run.output)}; correct the cause, then use --resume"
        ) from None


def _limit_concurrency(requested: int, player: Player, watch: RunReporter) -> int:
    """Return how many episodes to play concurrently: *requested*, or fewer if the limit of open files requires it."""
    most = count_affordable(player.connections)
    if requested > most:
        limit = raise_open_file_limit()
        watch.log(
            f"--concurrency {requested} needs more connections than this process may open ({limit} files); "
            f"playing {most} episodes at a time. Raise the limit with `ulimit -Hn`, or lower --concurrency"
        )
    return min(requested, most)


async def _prepare(folder: RunFolder, run: Run, watch: RunReporter, cast: PlayerSetup) -> RunInputs:
    """Start or resume the run in *folder*, and return its rows."""
    settings, stored, forced = await _check_folder(folder, run, cast, watch.log)
    about = describe_start(run.plan, cast.environments.values()) | forced
    sampling = describe_sampling(cast.model, run.plan.sampling)
    loop = asyncio.get_running_loop()

    def build_rows() -> Iterator[Row]:
        # In a thread.
        return _build_inputs(run.plan, lambda sentence: loop.call_soon_threadsafe(watch.log, sentence), cast)

    if stored is None:
        inputs = RunInputs(folder, build_rows)
        # A row of a file may be invalid, and then nothing is played.
        await inputs.write_first(None if run.plan.tasks else ROWS_BEFORE_START)
        about |= await asyncio.to_thread(describe_host)
        about |= _note_sampling(sampling, watch)
        folder.start(settings=settings, about=about, complete=inputs.is_complete)
        return inputs
    if _sends_earlier_sampling(folder.read_about(), run.plan, cast):
        sampling = EARLIER_SAMPLING
    folder.resume(about | _note_sampling(sampling, watch), repeats=run.plan.repeats)
    inputs = RunInputs(folder, None if folder.has_all_inputs else build_rows)
    await inputs.count_earlier_rows()
    return inputs


async def _check_folder(
    folder: RunFolder, run: Run, cast: PlayerSetup, log: Callable[[str], object]
) -> tuple[Row, Row | None, Row]:
    """Check whether *run* can start or resume in *folder*.

    Returns:
        The settings of the run, those of the run in the folder if it is resumed, and what run.json notes about
        differences that --force permits.

    Raises:
        BadOutput: The folder holds something else.
    """
    shown = shorten_path(run.output)
    servers = cast.served.describe() if cast.served else None
    resumes = run.resume and folder.can_resume
    stored = folder.read_settings() if resumes else None
    settings = await asyncio.to_thread(build_settings, run.plan, cast.environments, servers, stored=stored)
    if not run.overwrite and (strangers := folder.list_foreign_files()):
        names = ", ".join(strangers)
        raise BadOutput(f"{shown} holds {names}, but no run; use --overwrite, or choose another --output")
    if folder.holds_run and not (run.resume or run.overwrite):
        raise BadOutput(f"{shown} holds a run; continue it with --resume, or replace it with --overwrite")
    if run.resume and not folder.can_resume:
        log(f"{shown} holds no run to resume; starting a new one")
    if stored is None:
        return settings, None, {}
    forced = _compare_settings(stored, settings, shown, force=run.force, log=log)
    if not folder.inputs.exists():
        raise BadOutput(
            f"{shorten_path(folder.inputs)} is missing, so that the run cannot be resumed; start over with --overwrite"
        )
    await asyncio.to_thread(folder.check_lines, repeats=run.plan.repeats)
    return settings, stored, forced


def _compare_settings(
    stored: Row, requested: Row, shown: Path | str, *, force: bool, log: Callable[[str], object]
) -> Row:
    """Return what run.json notes about the differences that *force* permits: those of code.

    Raises:
        BadOutput: The settings differ in another way, or without *force*.
    """
    changed, code = list_differences(stored, requested), list_code_differences(stored, requested)
    refused = [phrase for phrase in changed if not (force and phrase in code)]
    if refused:
        advice = "resume it unchanged, or use another --output"
        advice += "; --force continues it with the changed code" if refused == code else ""
        listed = "".join(f"\n  {phrase}" for phrase in refused)
        raise BadOutput(f"the run in {shown} differs from this command:{listed}\n{advice}")
    for phrase in code:
        log(f"--force: {phrase}")
    return {"forced": code} if code else {}


def _sends_earlier_sampling(about: Row, plan: Plan, cast: PlayerSetup) -> bool:
    """Whether a run was begun by a version that sent temperature and top_p in place of the engine's defaults."""
    names = cast.served.policies if cast.served else {plan.model or ""}
    return not plan.model_options.get("tokens") and began_with_fixed_sampling(about, names)


def _note_sampling(sampling: str | None, watch: RunReporter) -> Row:
    """Report the sampling parameters that the run sends; return them for run.json."""
    if sampling is None:
        return {}
    watch.log(f"sampling: {sampling}")
    return {SAMPLING_KEY: sampling}


def _build_inputs(plan: Plan, log: Callable[[str], object], cast: PlayerSetup) -> Iterator[Row]:
    """Yield the rows as they are sent, one per rollout, ordered by task; *log* receives messages for the user.

    Raises:
        BadRow: There is no row to play.
    """
    taken = Counter[str]()
    own = find_index_fields(plan.tasks) if plan.tasks else frozenset()
    for name, row in _read_rows(plan, log, cast):
        task = row[TASK_INDEX] if TASK_INDEX in own else taken.total()
        first = row[ROLLOUT_INDEX] * plan.repeats if ROLLOUT_INDEX in own else 0
        played_by = cast.served.get_agent_for_row(row, name) if cast.served else None
        for repeat in range(first, first + plan.repeats):
            sampling, environment = plan.sampling, name
            yield build_input_row(
                row, environment=environment, task=task, repeat=repeat, sampling=sampling, agent=played_by
            )
        taken[name] += 1
    if not taken:
        source = plan.tasks or (
            f"split {plan.split!r}" if plan.split else f"the split of {', '.join(plan.environments)}"
        )
        raise BadRow(f"{source} has no rows to play; choose other rows with --tasks or --split")
    if plan.tasks is None and plan.limit is not None and min(taken[name] for name in cast.environments) < plan.limit:
        for sentence in describe_shortages(cast.environments, plan.split, counts=taken, limit=plan.limit):
            log(sentence)
    if plan.tasks is None and plan.limit is None and DEFAULT_TASKS in taken.values():
        log(f"playing the first {DEFAULT_TASKS} tasks; choose another number with --limit N")


def _read_rows(plan: Plan, log: Callable[[str], object], cast: PlayerSetup) -> NamedRows:
    if plan.tasks is None:
        return read_splits(cast.environments, plan.split, seed=plan.seed, limit=plan.limit or DEFAULT_TASKS)

    def bad(error: BadRow) -> None:
        if not plan.skip_bad_rows:
            sentence = f"{error}, or skip such rows with --skip-bad-rows"
            if isinstance(error, UnknownAgent):
                raise UnknownServer(sentence) from None
            raise BadRow(sentence) from None
        log(f"skipped {error}")

    if cast.served is not None:
        return read_file_for_servers(
            cast.served, list(plan.environments), plan.tasks, limit=plan.limit, bad=bad, agent=plan.agent
        )
    return read_file(cast.environments, plan.tasks, limit=plan.limit, bad=bad)
