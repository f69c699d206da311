"""One run, from a plan to its figures on disk."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Protocol

from gymsdk import descriptors, jsonl
from gymsdk.client import UnknownServer
from gymsdk.environment import Environment
from gymsdk.episode import Budget, play
from gymsdk.errors import BadOutput, BadRow, ModelLost, UsageError
from gymsdk.http import client
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.models import registry as models
from gymsdk.models.scripted import ScriptedModel
from gymsdk.plugins import registry
from gymsdk.rollouts import folder as lines
from gymsdk.rollouts.folder import RunFolder, Standing
from gymsdk.rollouts.jobs import Job, Key, agent, jobs, route, seed_of, stamped
from gymsdk.rollouts.plan import Plan, differences, host, occasion, settings
from gymsdk.rollouts.remote import Delivery, Distant, Served, Wanted, served
from gymsdk.rollouts.retry import Patience, Played, guarded, lost, settled
from gymsdk.rollouts.summary import Measured, summaries
from gymsdk.rollouts.tasks import (
    Sourced,
    Unserved,
    from_file,
    from_file_for,
    from_splits,
    has_agents,
    numbered,
    one_source,
    short,
    wanted,
)
from gymsdk.rollouts.trajectory import task_name, trajectory
from gymsdk.types import Failure, Model, Playable, Rollout, Row


class Player(Protocol):
    """Whoever plays jobs, as long as it is open: in this process, or by servers."""

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Open what the jobs are played with."""

    async def __call__(self, job: Job) -> Played:
        """Play *job* until it is settled; whatever becomes of it, it raises nothing of its own."""

    @property
    def connections(self) -> int:
        """How many connections a job in flight may need from this process."""


@dataclass(frozen=True, slots=True)
class Play:
    """How jobs are played in this process: against which environments, by which model, within which bounds."""

    environments: Mapping[str, Playable]
    model: Model
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    attempts: int = 3

    @property
    def connections(self) -> int:
        """Count one for the policy, where it is asked over the network, and one for a judge or a tool."""
        return 1 if isinstance(self.model, ScriptedModel) else 2

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Enter the environments that are entered."""
        async with AsyncExitStack() as opened:
            for environment in self.environments.values():
                if isinstance(environment, AbstractAsyncContextManager):
                    await opened.enter_async_context(environment)
            yield

    async def __call__(self, job: Job) -> Played:
        """Play *job* until it has been judged, cannot be, or has been tried often enough."""
        return await settled(job, self.once, attempts=self.attempts)

    async def once(self, job: Job, _attempt: int = 0) -> Rollout:
        """Play *job* one time."""
        return await guarded(job, seed_of(self.seed, job), self._played(job))

    async def _played(self, job: Job) -> Rollout:
        return await play(
            self.environments[job.environment],
            self.model,
            job.row,
            seed=seed_of(self.seed, job),
            repeat=job.repeat,
            id=job.id,
            budget=self.budget,
        )


async def collect(
    source: Iterable[Job], play: Callable[[Job], Awaitable[Played]], *, at_once: int = 64
) -> AsyncGenerator[Played, None]:
    """Play every job, *at_once* at a time, yielding each as it ends."""
    remaining = iter(source)
    running: set[asyncio.Future[Played]] = set()
    ended: asyncio.Queue[asyncio.Future[Played]] = asyncio.Queue()

    def fill() -> None:
        for job in islice(remaining, at_once - len(running)):
            started = asyncio.ensure_future(play(job))
            started.add_done_callback(ended.put_nowait)
            running.add(started)

    try:
        fill()
        while running:
            finished = await ended.get()
            running.discard(finished)
            fill()
            yield finished.result()
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def complete(
    folder: RunFolder,
    player: Player,
    *,
    done: Container[Key],
    at_once: int,
    told: Callable[[Played], None],
    trajectories: bool = False,
) -> None:
    """Play the rollouts that *folder* still lacks.

    Args:
        folder: The run's folder.
        player: Plays the jobs.
        done: The keys of the rollouts that are finished.
        at_once: The number of episodes in flight.
        told: Is called with each finished rollout, after its line is on disk.
        trajectories: Whether each line gets NeMo Gym's `ng_trajectory`.
    """
    missing = jobs(folder.read_inputs(), done=done)
    async with player.opened(), aclosing(collect(missing, player, at_once=at_once)) as ends:
        async for played in ends:
            told(keep(folder, played, trajectories=trajectories))


def keep(folder: RunFolder, played: Played, *, trajectories: bool = False) -> Played:
    """Put a finished rollout on disk, among the scored or among the failures, and give it as it was put there."""
    try:
        _keep(folder, played, trajectories=trajectories)
    except (TypeError, ValueError, RecursionError) as error:
        # A verdict or a response may hold what JSON cannot; nothing of it has been written then.
        failure = Failure(stage="verify", kind="bad_answer", message=f"it cannot be written as JSON: {error}")
        left = lost(played.job, played.rollout.seed, failure, played.rollout.usage)
        played = Played(played.job, left, played.attempts)
        _keep(folder, played)
    return played


def _keep(folder: RunFolder, played: Played, *, trajectories: bool = False) -> None:
    key, rollout = played.job.key, played.rollout
    if rollout.failure is None:
        line = lines.scored(rollout, key, attempts=played.attempts)
        if trajectories:
            name = task_name(rollout.row, key[0])
            line[lines.TRAJECTORY] = trajectory(rollout, task_id=name, rollout_id=f"{key[0]}-{key[1]}")
        folder.keep(line)
    else:
        folder.keep(lines.failed(played.rollout, key, attempts=played.attempts), failed=True)


ENDLESS = 100
"""How many tasks are taken of a split that may have no end, where no limit is given."""


class Watch(Protocol):
    """Someone who follows a run."""

    def told(self, sentence: str) -> None:
        """Hear what a person should know of the run."""

    def begun(self, *, total: int, standing: Standing) -> None:
        """Hear how many rollouts there are to be, and how far an earlier run has come."""

    def ended(self, played: Played) -> None:
        """Hear of a finished rollout, on disk by now."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How hard a run tries: episodes in flight at once, tries of a failed one, seconds for a model call."""

    at_once: int = 64
    attempts: int = 3
    timeout: float = 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """A plan on its way to a folder: on top of what is there, in place of it, or where nothing is.

    The *model* plays that the plan names, where it is there by now. With *trajectories*, each line has NeMo Gym's
    `ng_trajectory`.
    """

    plan: Plan
    output: Path
    resume: bool = False
    overwrite: bool = False
    pace: Pace = Pace()
    model: Model | None = None
    trajectories: bool = False


@dataclass(frozen=True, slots=True)
class Cast:
    """Who takes part in a run: the environments that are loaded here, the servers if there are any, who plays."""

    environments: Mapping[str, Environment]
    player: Player
    served: Served | None = None


async def carry_out(run: Run, watch: Watch) -> list[Row]:
    """Play *run* to its end and give the figures of each environment, which are in `metrics.json` too.

    Raises `UsageError` before anything is written where the plan cannot be played, `ModelLost` where it gives up.
    """
    if run.resume and run.overwrite:
        raise UsageError("--resume goes on with the run in the folder, --overwrite replaces it; choose one of them")
    one_source(run.plan.tasks, run.plan.split)
    try:
        cast = await _cast(run)
        with RunFolder(run.output) as folder:
            _prepare(folder, run, watch, cast)
            await _complete(folder, run, watch, cast.player)
            figures = await summaries(folder, _measured(folder, cast))
            folder.conclude(figures)
            return figures
    finally:
        await client.aclose()


async def _cast(run: Run) -> Cast:
    plan, pace = run.plan, run.pace
    if plan.head is None:
        loaded = _loaded(plan)
        model = run.model or models.model(
            plan.model or "",
            base_url=plan.base_url,
            api=plan.api,
            timeout=pace.timeout,
            pinned=plan.pinned,
            tokens=plan.tokens,
        )
        return Cast(loaded, Play(loaded, model, plan.seed, plan.budget, pace.attempts))
    loaded = {} if plan.tasks else _loaded(plan)
    # Once, whatever the number of looks, and beside the loop: a line may be long.
    asked = await asyncio.to_thread(_wanted, plan)
    found = await served(plan.head, lambda servers: has_agents(servers, asked))
    found.checked(list(loaded))
    seconds = plan.budget.seconds + pace.timeout
    delivery = Delivery(found.client, plan.seed, plan.budget, pace.attempts, seconds, once=found.plays_once)
    return Cast(loaded, delivery, found)


def _wanted(plan: Plan) -> list[Wanted]:
    names = list(plan.environments)
    if plan.tasks is None:
        return [(name, name) for name in names]
    return wanted(names, plan.tasks, limit=plan.limit, agent=plan.agent)


def _loaded(plan: Plan) -> dict[str, Environment]:
    return {name: registry.load(name, **given) for name, given in plan.environments.items()}


def _measured(folder: RunFolder, cast: Cast) -> dict[str, Measured]:
    """Give whoever has figures of the folder's rollouts, by environment."""
    measured: dict[str, Measured] = dict(cast.environments)
    for row in folder.read_inputs() if cast.served else ():
        name, played_by = route(row), agent(row)
        if cast.served and name is not None and played_by is not None and name not in measured:
            measured[name] = Distant(name, played_by, cast.served.client)
    return measured


async def _complete(folder: RunFolder, run: Run, watch: Watch, player: Player) -> None:
    standing = folder.standing()
    watch.begun(total=sum(1 for _ in jsonl.read_lines(folder.inputs)), standing=standing)
    patience = Patience(scored=standing.scored)

    def told(played: Played) -> None:
        watch.ended(played)
        patience.heard(played.rollout)

    at_once = _at_once(run.pace.at_once, player, watch)
    try:
        observed = run.trajectories
        await complete(folder, player, done=standing.done, at_once=at_once, told=told, trajectories=observed)
    except ModelLost as error:
        raise ModelLost(f"{error}; what has finished is in {run.output}; mend that, then go on with --resume") from None


def _at_once(asked: int, player: Player, watch: Watch) -> int:
    """Give how many episodes to play at once: as many as *asked* for, or as the limit of open files allows."""
    most = descriptors.count_affordable(player.connections)
    if asked > most:
        limit = descriptors.raise_open_file_limit()
        watch.told(
            f"--concurrency {asked} takes more connections than this process may have ({limit} open files);"
            f" {most} episodes are played at once; raise the limit with `ulimit -Hn`, or lower --concurrency"
        )
    return min(asked, most)


def _prepare(folder: RunFolder, run: Run, watch: Watch, cast: Cast) -> None:
    servers = cast.served.identity() if cast.served else None
    asked, now = settings(run.plan, cast.environments, servers), occasion(run.plan, cast.environments.values())
    if not run.overwrite and (strangers := folder.strangers()):
        found = ", ".join(strangers)
        raise BadOutput(f"{run.output} holds {found} of no run; replace with --overwrite, or choose another --output")
    if folder.ours and not (run.resume or run.overwrite):
        raise BadOutput(f"{run.output} holds a run; go on with --resume, replace it with --overwrite")
    if run.resume and not folder.begun:
        watch.told(f"there is no run in {run.output} to go on with; it begins anew")
    if not (run.resume and folder.begun):
        folder.begin(settings=asked, about={**now, **host()}, inputs=_inputs(run.plan, watch, cast))
        return
    if changed := differences(folder.settings(), asked):
        told = "; ".join(changed)
        raise BadOutput(
            f"{run.output} was begun otherwise: {told}; go on with it as it was begun, or choose another --output"
        )
    if not folder.inputs.exists():
        raise BadOutput(f"{folder.inputs} is missing, which says what to play; start over with --overwrite")
    folder.resume(now, repeats=run.plan.repeats)


def _inputs(plan: Plan, watch: Watch, cast: Cast) -> Iterator[Row]:
    """Yield the rows as they are sent, one for each rollout, task by task.

    Raises:
        BadRow: There is no row to play.
    """
    taken = Counter[str]()
    own = numbered(plan.tasks) if plan.tasks else frozenset()
    for name, row in _sourced(plan, watch, cast):
        task = row[TASK_INDEX] if TASK_INDEX in own else taken.total()
        first = row[ROLLOUT_INDEX] * plan.repeats if ROLLOUT_INDEX in own else 0
        played_by = cast.served.agent_of(row, name) if cast.served else None
        for repeat in range(first, first + plan.repeats):
            sampling, environment = plan.sampling, name
            yield stamped(row, environment=environment, task=task, repeat=repeat, sampling=sampling, agent=played_by)
        taken[name] += 1
    if not taken:
        source = plan.tasks or (
            f"split {plan.split!r}" if plan.split else f"the split of {', '.join(plan.environments)}"
        )
        raise BadRow(f"{source} has no rows to play; name another with --tasks or --split")
    if plan.tasks is None and plan.limit is not None and min(taken[name] for name in cast.environments) < plan.limit:
        for sentence in short(cast.environments, plan.split, seed=plan.seed, limit=plan.limit):
            watch.told(sentence)
    if plan.tasks is None and plan.limit is None and ENDLESS in taken.values():
        watch.told(f"took the first {ENDLESS} tasks; --limit N takes another number")


def _sourced(plan: Plan, watch: Watch, cast: Cast) -> Sourced:
    if plan.tasks is None:
        return from_splits(cast.environments, plan.split, seed=plan.seed, limit=plan.limit or ENDLESS)

    def bad(error: BadRow) -> None:
        if not plan.skip_bad_rows:
            sentence = f"{error}, or leave such rows out with --skip-bad-rows"
            if isinstance(error, Unserved):
                raise UnknownServer(sentence) from None
            raise BadRow(sentence) from None
        watch.told(f"skipped {error}")

    if cast.served is not None:
        return from_file_for(
            cast.served, list(plan.environments), plan.tasks, limit=plan.limit, bad=bad, agent=plan.agent
        )
    return from_file(cast.environments, plan.tasks, limit=plan.limit, bad=bad)
