"""One run, from a plan to its figures on disk."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gymsdk import descriptors, http, rows
from gymsdk.client import Unknown
from gymsdk.environment import Environment
from gymsdk.errors import BadOutput, BadRow, ModelLost, UsageError
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.models import registry as models
from gymsdk.plugins import registry
from gymsdk.rollouts.collect import Play, Player, complete
from gymsdk.rollouts.delivery import Delivery
from gymsdk.rollouts.folder import RunFolder, Standing
from gymsdk.rollouts.jobs import agent, route, stamped
from gymsdk.rollouts.origin import host, occasion
from gymsdk.rollouts.patience import Patience
from gymsdk.rollouts.plan import Plan, differences, settings
from gymsdk.rollouts.served import Distant, Served, Wanted, served
from gymsdk.rollouts.sources import (
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
from gymsdk.rollouts.summary import Measured, summaries
from gymsdk.rollouts.tries import Played
from gymsdk.types import Model, Row

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
        await http.aclose()


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
    watch.begun(total=sum(1 for _ in rows.lines(folder.inputs)), standing=standing)
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
    most = descriptors.affordable(player.connections)
    if asked > most:
        limit = descriptors.raise_limit()
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
                raise Unknown(sentence) from None
            raise BadRow(sentence) from None
        watch.told(f"skipped {error}")

    if cast.served is not None:
        return from_file_for(
            cast.served, list(plan.environments), plan.tasks, limit=plan.limit, bad=bad, agent=plan.agent
        )
    return from_file(cast.environments, plan.tasks, limit=plan.limit, bad=bad)
