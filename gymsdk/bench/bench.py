"""A bench: environments served and asked for rollouts in a closed loop, at one load after the other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from gymsdk import http, values
from gymsdk.bench.figures import Load, Served
from gymsdk.bench.load import Order, loaded
from gymsdk.bench.recording import Recording, recorded, unplayed
from gymsdk.bench.stage import Stage, joined, policy, started
from gymsdk.environment import Environment
from gymsdk.errors import UsageError
from gymsdk.models import registry as models
from gymsdk.outcome import Rollout
from gymsdk.plugins import registry
from gymsdk.servers.policy import NAME

SCRIPTED = "scripted/"
"""What the names of the policies begin with that can be played here."""

RECORDED = "scripted/oracle"
"""Who is recorded where nobody is named."""

DISTINCT = 128
"""Tasks that are recorded at most: a load of more rollouts plays them again."""

WARM = 32
"""Rollouts before the first load that do not count: they import what is needed and start the workers."""

Heard: TypeAlias = Callable[[str], None]
"""Is told what is going on."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What is measured: *environments* by name with their settings, at the loads *at_once*, each of *rollouts*.

    With *minutes* each load lasts so long instead. *model* is a scripted policy that plays in the servers' process;
    without one, they ask the endpoint of a policy that plays what the oracle did. With a *head* its servers are
    asked, and *model* is whom their rewards are held to. Tasks are those of *split* whose rollouts are to *keep*.
    """

    environments: Mapping[str, Mapping[str, Any]]
    at_once: tuple[int, ...] = (16,)
    rollouts: int = 200
    minutes: float | None = None
    head: str | None = None
    model: str | None = None
    split: str | None = None
    attempts: int = 1
    keep: Callable[[Rollout], bool] = field(default=lambda _: True)


async def measured(bench: Bench, heard: Heard = lambda _: None) -> AsyncGenerator[Served, None]:
    """Yield what is found of each environment of *bench*, one after the other; *heard* is told what is going on."""
    if bench.model is not None and not bench.model.startswith(SCRIPTED):
        raise UsageError(f"--model {bench.model}: rewards are known beforehand of scripted policies alone; name one")
    try:
        for name, settings in bench.environments.items():
            yield await _served(bench, registry.load(name, **settings), heard)
    finally:
        await http.aclose()


async def _served(bench: Bench, environment: Environment, heard: Heard) -> Served:
    async with AsyncExitStack() as left:
        cast = await _cast(bench, environment, heard, left)
        loads = [each async for each in _loads(bench, cast, heard)]
    start = cast.stage.start
    return Served(
        environment=environment.name,
        model=cast.model,
        ready=start and round(start.seconds, 3),
        ready_cpu=start and round(start.cpu, 3),
        ready_memory=start and round(start.memory, 1),
        loads=tuple(loads),
    )


@dataclass(frozen=True, slots=True)
class _Cast:
    """The servers that are asked, what they are asked to play, and what plays it."""

    stage: Stage
    recording: Recording
    model: str


async def _cast(bench: Bench, environment: Environment, heard: Heard, left: AsyncExitStack) -> _Cast:
    """Give the cast for *environment*; what is started for it ends when *left* is left."""
    if bench.head is not None:
        stage = await joined(bench.head)
        return _Cast(stage, await _recording(bench, environment, bench.model or stage.model), stage.model)
    heard(f"{environment.name}: recording, then starting its servers")
    model = bench.model or RECORDED
    recording = await _recording(bench, environment, model)
    words = [environment.name, *_words(bench.environments[environment.name])]
    if bench.model is not None:
        return _Cast(await left.enter_async_context(started(words, model=model)), recording, model)
    folder = left.enter_context(TemporaryDirectory(prefix="gymsdk-"))
    recording.write(Path(folder) / "recording.jsonl")
    endpoint = await left.enter_async_context(policy(Path(folder) / "recording.jsonl"))
    stage = await left.enter_async_context(started(words, model=f"endpoint/{NAME}", endpoint=endpoint))
    return _Cast(stage, recording, f"endpoint/{NAME}, which replays {model}")


def _words(settings: Mapping[str, Any]) -> list[str]:
    """Give *settings* as words of a command."""
    said = {key: each if isinstance(each, str) else values.written(each).decode() for key, each in settings.items()}
    return [word for key, each in said.items() for word in ("--set", f"{key}={each}")]


async def _recording(bench: Bench, environment: Environment, model: str) -> Recording:
    """Give what is asked for, its rewards known where *model* can be played here."""
    limit = min(bench.rollouts, DISTINCT)
    if not model.startswith(SCRIPTED):
        return unplayed(environment, split=bench.split, limit=limit)
    player = models.model(model)
    return await recorded(environment, player, split=bench.split, limit=limit, keep=bench.keep)


async def _loads(bench: Bench, cast: _Cast, heard: Heard) -> AsyncGenerator[Load, None]:
    await loaded(cast.stage, cast.recording, Order(at_once=min(WARM, max(bench.at_once)), rollouts=WARM))
    for at_once in bench.at_once:
        order = Order(at_once, rollouts=bench.rollouts, attempts=bench.attempts)
        if bench.minutes is not None:
            order = Order(at_once, seconds=60 * bench.minutes, attempts=bench.attempts)
        heard(f"{cast.recording.environment}: {at_once} at once")
        yield await loaded(cast.stage, cast.recording, order)
