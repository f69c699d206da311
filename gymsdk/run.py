"""One run, from a plan to its figures on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from gymsdk import http, rows
from gymsdk.environment import Environment
from gymsdk.errors import BadOutput, BadRow
from gymsdk.folder import RunFolder
from gymsdk.models import registry as models
from gymsdk.plan import Plan, about, differences, settings
from gymsdk.plugins import registry
from gymsdk.rollouts import Play, Played, complete
from gymsdk.sources import from_file, from_splits
from gymsdk.summary import summaries
from gymsdk.types import Row

ENDLESS = 100
"""How many tasks are taken of a split that may have no end, where no limit is given."""


class Watch(Protocol):
    """Someone who follows a run."""

    def skipped(self, error: BadRow) -> None:
        """Hear of a row that is left out."""

    def begun(self, *, total: int, done: int) -> None:
        """Hear how many rollouts there are to be, and how many an earlier run has done."""

    def ended(self, played: Played) -> None:
        """Hear of a finished rollout, on disk by now."""


@dataclass(frozen=True, slots=True)
class Run:
    """How a plan is carried out: where to, on top of what, how many at once and how often a failed one is tried."""

    plan: Plan
    output: Path
    watch: Watch
    resume: bool = False
    overwrite: bool = False
    at_once: int = 64
    attempts: int = 3
    timeout: float = 600.0
    environments: Mapping[str, Environment] = field(default_factory=dict)


async def carry_out(run: Run) -> list[Row]:
    """Play *run* to its end and give the figures of each environment, which are in `metrics.json` too.

    Raises `UsageError` before anything is written where the plan cannot be played.
    """
    plan = run.plan
    environments = {name: registry.load(name, **given) for name, given in plan.environments.items()}
    model = models.model(plan.model, base_url=plan.base_url, api=plan.api, timeout=run.timeout)
    play = Play(environments, model, plan.seed, plan.budget, plan.sampling, run.attempts)
    try:
        with RunFolder(run.output) as folder:
            _prepare(folder, run, environments)
            total = plan.repeats * sum(1 for _ in rows.lines(folder.inputs))
            run.watch.begun(total=total, done=len(folder.done()))
            await complete(folder, play, repeats=plan.repeats, at_once=run.at_once, told=run.watch.ended)
            figures = await summaries(folder, environments, repeats=plan.repeats)
            folder.conclude(figures)
            return figures
    finally:
        await http.aclose()


def _prepare(folder: RunFolder, run: Run, environments: Mapping[str, Environment]) -> None:
    asked = settings(run.plan, environments)
    if run.resume and folder.run.exists():
        if changed := differences(folder.settings(), asked):
            raise BadOutput(
                f"{run.output} was begun with other settings: {'; '.join(changed)}; repeat those, or choose another"
                " --output"
            )
        folder.repair()
        return
    if folder.rollouts.exists() and not run.overwrite:
        raise BadOutput(f"{run.output} holds a run; go on with --resume, replace it with --overwrite")
    if folder.holds_a_run() and not (run.overwrite or run.resume):
        raise BadOutput(f"{run.output} holds a run that has not begun; begin it with --resume or --overwrite")
    folder.begin(asked, about(), _inputs(run, environments))


def _inputs(run: Run, environments: Mapping[str, Environment]) -> Iterator[Row]:
    plan = run.plan
    if plan.tasks is None:
        return from_splits(environments, plan.split, seed=plan.seed, limit=plan.limit or ENDLESS)
    return from_file(environments, plan.tasks, limit=plan.limit, bad=run.watch.skipped if plan.skip_bad_rows else None)
