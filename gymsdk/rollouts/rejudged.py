"""Rejudged: stored rollouts judged once more, here or by running servers, and which of their rewards that changes."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from gymsdk import judging, told
from gymsdk.environment import Environment
from gymsdk.errors import BadConfig, BadRow, EpisodeError, Failed, UsageError
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.plugins import registry
from gymsdk.rollouts import answered
from gymsdk.rollouts.cases import Case, Run
from gymsdk.rollouts.delivery import of_server
from gymsdk.rollouts.jobs import agent
from gymsdk.rollouts.lines import TRAJECTORY, WRITTEN
from gymsdk.rollouts.served import Served, Wanted, all_known
from gymsdk.rollouts.sources import SAMPLE
from gymsdk.sitting import Budget
from gymsdk.told import Judgement
from gymsdk.types import Row

if TYPE_CHECKING:
    from gymsdk.http import Answer

STATELESS = "stateless"
"""The word of a resources server whose verdicts need no session."""

Judge: TypeAlias = Callable[[Case], Awaitable[Judgement]]
"""Judges a case; raises `EpisodeError`, and `BadRow` where the row does not fit."""


@dataclass(frozen=True, slots=True)
class Rejudged:
    """What came of judging a *case* once more: a judgement, or why there is none."""

    case: Case
    judgement: Judgement | None = None
    kind: str = ""
    reason: str = ""

    @property
    def changed(self) -> bool:
        """Whether it earns something else now."""
        if self.judgement is None:
            return False
        old = self.case.reward
        return old is None or not math.isclose(old, self.judgement.reward, rel_tol=1e-9, abs_tol=1e-12)

    def line(self) -> Row | None:
        """Give its line as it would be written now, `None` where there is no judgement."""
        if self.judgement is None:
            return None
        before = self.case.line
        ours = before.get("gymsdk")
        names = ours.get("verdict", ()) if isinstance(ours, dict) else ()
        stale = {
            *names,
            *(WRITTEN - {"response", TRAJECTORY, "gymsdk"}),
            "mask_sample",
            "failure_kind",
            "failure_reason",
        }
        kept = {key: each for key, each in before.items() if key not in stale and not key.startswith("_ng_failure_")}
        sent = self.case.sent or {}
        row = {name: sent[name] for name in names if name in sent}
        parts = {"reward_components": self.judgement.components} if self.judgement.components else {}
        line = {**kept, **row, **self.judgement.fields, "reward": self.judgement.reward, **parts}
        if isinstance(ours, dict):
            line["gymsdk"] = {**ours, "outcome": "scored", "verdict": list(self.judgement.fields)}
        return line


async def rejudged(cases: Iterable[Case], judge: Judge, *, at_once: int) -> AsyncGenerator[Rejudged, None]:
    """Judge every case, *at_once* at a time, yielding each in its order."""
    pending: deque[asyncio.Task[Rejudged]] = deque()
    try:
        for case in cases:
            if len(pending) >= at_once:
                yield await pending.popleft()
            pending.append(asyncio.ensure_future(_judged(case, judge)))
        while pending:
            yield await pending.popleft()
    finally:
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _judged(case: Case, judge: Judge) -> Rejudged:
    try:
        return Rejudged(case, await judge(case))
    except BadRow as error:
        return Rejudged(case, kind="bad_row", reason=str(error))
    except EpisodeError as error:
        return Rejudged(case, kind=error.kind, reason=str(error))


@asynccontextmanager
async def here(run: Run, given: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[Judge]:
    """Open the installed environments of a stored *run*, with its settings under those *given*, and give their judge.

    Raises `UsageError` where one is not installed, or does not take the settings.
    """
    environments = {name: _loaded(name, run.settings(name), settings) for name, settings in given.items()}

    async def judge(case: Case) -> Judgement:
        return await _verdict(environments[case.environment], case)

    async with AsyncExitStack() as opened:
        for each in environments.values():
            await opened.enter_async_context(each)
        yield judge


def _loaded(name: str, stored: Mapping[str, Any], given: Mapping[str, Any]) -> Environment:
    """Give *name* as it was played, as far as it still has those settings."""
    try:
        known = set(type(registry.load(name).config).model_fields)
    except BadConfig:
        known = set(stored)
    return registry.load(name, **{**{key: stored[key] for key in stored if key in known}, **given})


async def _verdict(environment: Environment, case: Case) -> Judgement:
    found = await judging.judged(
        environment,
        case.row,
        case.response["output"],
        seed=case.seed,
        repeat=case.repeat,
        ended=case.ended,
        opening=case.opening,
        seconds=Budget().seconds,
    )
    return Judgement(found.reward, found.components, found.fields)


def elsewhere(found: Served) -> Judge:
    """Give the judge that asks the resources servers *found*, without a session."""

    async def judge(case: Case) -> Judgement:
        name = found.resources_of(case.line, case.environment)
        stamps = {key: case.line[key] for key in (TASK_INDEX, ROLLOUT_INDEX) if key in case.line}
        ours = {"seed": case.seed, "repeat": case.repeat, "ended": case.ended}
        body = {**case.row, **stamps, "response": case.response, "gymsdk": ours}
        try:
            answer = await found.client.post(name, "/verify", json=body)
        except Failed as error:
            raise of_server(error) from error
        return told.judgement(answered.object_of(answer, "verify"), case.row)

    return judge


def wanted(run: Run) -> list[Wanted]:
    """Give whom the rollouts of *run* were played by, of the first `SAMPLE` at least."""
    return list(dict.fromkeys((agent(case.line), case.environment) for case in islice(run.cases(), SAMPLE)))


def has_judges(found: Served, wanted: Iterable[Wanted]) -> bool:
    """Give whether *found* have the resources servers that judge what was played by those *wanted*."""
    return all_known(found.resources_named, wanted)


async def sessionless(found: Served, run: Run, *, force: bool) -> list[str]:
    """Give the resources servers of *run* that do not say that they judge without a session.

    Raises `UsageError` where there is one, unless it is asked by *force*.
    """
    asked = dict.fromkeys(found.resources_of(case.line, case.environment) for case in run.cases())
    unsure = [name for name in asked if _mode(await found.client.get(name, "/reverify_mode")) != STATELESS]
    if unsure and not force:
        named = ", ".join(map(repr, unsure))
        raise UsageError(
            f"the resources server {named} does not say that it judges without a session: its rewards may differ for"
            " that alone; ask it all the same with --force"
        )
    return unsure


def _mode(answer: Answer) -> object:
    return told.value_of(answer) if answer.ok else None
