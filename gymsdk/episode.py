"""One episode, played: the loop between a model and whatever answers its actions, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gymsdk import responses, trail
from gymsdk.errors import EpisodeError, UsageError
from gymsdk.outcome import Rollout
from gymsdk.sitting import Budget, Sitting
from gymsdk.transcript import Item
from gymsdk.types import Episode, Model, Playable, Row, Task


async def play(
    environment: Playable,
    model: Model,
    row: Row | Task,
    *,
    seed: int = 0,
    repeat: int = 0,
    id: str = "",
    budget: Budget | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> Rollout:
    """Play one episode of *row* and give its rollout: scored, unscorable or failed, never raised.

    *sampling* goes over the row's own `responses_create_params`. Raises `UsageError` where the row does not fit the
    environment; anything else that goes wrong is in the rollout's `failure`.
    """
    _check(environment, model)
    sitting = Sitting(environment, budget, sampling)
    with trail.of_rollout(id):
        try:
            episode = await sitting.open(row, seed=seed, id=id, repeat=repeat)
            while not sitting.over:
                await _turn(sitting, episode, model)
            await sitting.judge()
        except EpisodeError as error:
            sitting.ending = error
        finally:
            await sitting.close()
    return sitting.rollout()


async def _turn(sitting: Sitting, episode: Episode, model: Model) -> None:
    """Ask the model once and have its turn answered; the episode is over where its deadline comes first."""
    response = await _asked(sitting, episode, model) if _has_time(episode) else None
    if response is None:
        episode.transcript.ended = "deadline"
        return
    await sitting.answer(response)


def _has_time(episode: Episode) -> bool:
    return episode.deadline is None or asyncio.get_running_loop().time() < episode.deadline


async def _asked(sitting: Sitting, episode: Episode, model: Model) -> Item | None:
    """Give the model's response, `None` where the episode's deadline came first."""
    request = request_of(episode, sitting.sampling)
    with sitting.clocked("model"):
        try:
            async with asyncio.timeout_at(episode.deadline):
                return await responses.asked(model, request, episode=episode)
        except TimeoutError:
            return None
        except EpisodeError as error:
            error.stage = "model"
            raise


def _check(environment: object, model: object) -> None:
    if isinstance(environment, str):
        raise UsageError(f"play takes an environment, not its name; write gymsdk.load({environment!r})")
    if isinstance(model, str):
        raise UsageError(f"play takes a model, not its name; write gymsdk.model({model!r})")
    responses.check(model)


def request_of(episode: Episode, sampling: Mapping[str, Any]) -> Item:
    """Give the Responses request for the episode's next turn: its history, its tools, the row's own parameters."""
    own = {key: value for key, value in episode.task.responses_create_params.items() if value is not None}
    own.pop("tools", None)
    history = [*episode.transcript.opening, *episode.transcript.items]
    tools = {"tools": episode.tools} if episode.tools else {}
    return {**own, **sampling, "input": history, **tools}
