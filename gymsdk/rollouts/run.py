"""One run, from a plan to its figures on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gymsdk import http, rows
from gymsdk.environment import Environment
from gymsdk.errors import BadOutput, BadRow, ModelLost, UsageError
from gymsdk.metrics import TASK_INDEX
from gymsdk.models import registry as models
from gymsdk.plugins import registry
from gymsdk.rollouts.collect import Play, Played, complete
from gymsdk.rollouts.folder import RunFolder, Standing
from gymsdk.rollouts.jobs import stamped
from gymsdk.rollouts.origin import host, occasion
from gymsdk.rollouts.patience import Patience
from gymsdk.rollouts.plan import Plan, differences, settings
from gymsdk.rollouts.sources import Sourced, from_file, from_splits, numbered, one_source
from gymsdk.rollouts.summary import summaries
from gymsdk.types import Row

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
    """A plan on its way to a folder: on top of what is there, in place of it, or where nothing is."""

    plan: Plan
    output: Path
    resume: bool = False
    overwrite: bool = False
    pace: Pace = Pace()


async def carry_out(run: Run, watch: Watch) -> list[Row]:
    """Play *run* to its end and give the figures of each environment, which are in `metrics.json` too.

    Raises `UsageError` before anything is written where the plan cannot be played, `ModelLost` where it gives up.
    """
    plan = run.plan
    if run.resume and run.overwrite:
        raise UsageError("--resume goes on with the run in the folder, --overwrite replaces it; choose one of them")
    one_source(plan.tasks, plan.split)
    environments = {name: registry.load(name, **given) for name, given in plan.environments.items()}
    model = models.model(plan.model, base_url=plan.base_url, api=plan.api, timeout=run.pace.timeout)
    play = Play(environments, model, plan.seed, plan.budget, run.pace.attempts)
    try:
        with RunFolder(run.output) as folder:
            _prepare(folder, run, watch, environments)
            await _complete(folder, run, watch, play)
            figures = await summaries(folder, environments, repeats=plan.repeats)
            folder.conclude(figures)
            return figures
    finally:
        await http.aclose()


async def _complete(folder: RunFolder, run: Run, watch: Watch, play: Play) -> None:
    repeats, standing = run.plan.repeats, folder.standing()
    watch.begun(total=repeats * sum(1 for _ in rows.lines(folder.inputs)), standing=standing)
    patience = Patience(scored=standing.scored)

    def told(played: Played) -> None:
        watch.ended(played)
        patience.heard(played.rollout)

    try:
        await complete(folder, play, repeats=repeats, done=standing.done, at_once=run.pace.at_once, told=told)
    except ModelLost as error:
        raise ModelLost(f"{error}; what has finished is in {run.output}; mend that, then go on with --resume") from None


def _prepare(folder: RunFolder, run: Run, watch: Watch, environments: Mapping[str, Environment]) -> None:
    asked, now = settings(run.plan, environments), occasion(run.plan, environments.values())
    if not run.overwrite and (strangers := folder.strangers()):
        found = ", ".join(strangers)
        raise BadOutput(f"{run.output} holds {found} of no run; replace with --overwrite, or choose another --output")
    if folder.ours and not (run.resume or run.overwrite):
        raise BadOutput(f"{run.output} holds a run; go on with --resume, replace it with --overwrite")
    if run.resume and not folder.begun:
        watch.told(f"there is no run in {run.output} to go on with; it begins anew")
    if not (run.resume and folder.begun):
        folder.begin(settings=asked, about={**now, **host()}, inputs=_inputs(run.plan, watch, environments))
        return
    if changed := differences(folder.settings(), asked):
        told = "; ".join(changed)
        raise BadOutput(
            f"{run.output} was begun otherwise: {told}; go on with it as it was begun, or choose another --output"
        )
    if not folder.inputs.exists():
        raise BadOutput(f"{folder.inputs} is missing, which says what to play; start over with --overwrite")
    folder.resume(now)


def _inputs(plan: Plan, watch: Watch, environments: Mapping[str, Environment]) -> Iterator[Row]:
    """Yield the rows as they are sent; raises `BadRow` where there is none."""
    taken = Counter[str]()
    own = plan.tasks is not None and numbered(plan.tasks)
    for name, row in _sourced(plan, watch, environments):
        task = row[TASK_INDEX] if own else taken.total()
        yield stamped(row, environment=name, task=task, sampling=plan.sampling)
        taken[name] += 1
    if not taken:
        source = plan.tasks or (f"split {plan.split!r}" if plan.split else f"the split of {', '.join(environments)}")
        raise BadRow(f"{source} has no rows to play; name another with --tasks or --split")
    if plan.tasks is None and plan.limit is None and ENDLESS in taken.values():
        watch.told(f"took the first {ENDLESS} tasks; --limit N takes another number")


def _sourced(plan: Plan, watch: Watch, environments: Mapping[str, Environment]) -> Sourced:
    if plan.tasks is None:
        return from_splits(environments, plan.split, seed=plan.seed, limit=plan.limit or ENDLESS)

    def bad(error: BadRow) -> None:
        if not plan.skip_bad_rows:
            raise BadRow(f"{error}, or leave such rows out with --skip-bad-rows") from None
        watch.told(f"skipped {error}")

    return from_file(environments, plan.tasks, limit=plan.limit, bad=bad)
