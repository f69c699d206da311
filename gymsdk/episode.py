"""One episode, played: the loop between a model and whatever answers its actions, written once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from gymsdk import responses, trail
from gymsdk.errors import EpisodeError, Failed, UsageError
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
            while not sitting.is_over:
                await _turn(sitting, episode, model)
            await sitting.verify()
        except EpisodeError as error:
            sitting.result = error
        finally:
            await sitting.close()
    return sitting.build_rollout()


async def _turn(sitting: Sitting, episode: Episode, model: Model) -> None:
    """Ask the model once and play its turn; end the episode as truncated if its deadline has passed."""
    if not _has_time(episode):
        episode.transcript.ended = "deadline"
        return
    await sitting.apply_response(await _asked(sitting, episode, model))


def _has_time(episode: Episode) -> bool:
    return episode.deadline is None or asyncio.get_running_loop().time() < episode.deadline


async def _asked(sitting: Sitting, episode: Episode, model: Model) -> Item:
    """Return the model's response.

    Raises:
        EpisodeError: The model failed, or did not answer before the episode's deadline (kind `model_timeout`). The
            policy did not spend that time, so the episode is not truncated and judged: it has failed.
    """
    request = request_of(episode, sitting.sampling)
    with sitting.time_stage("model"):
        try:
            async with asyncio.timeout_at(episode.deadline):
                return await responses.asked(model, request, episode=episode)
        except TimeoutError as error:
            raise Failed(
                f"the model did not answer before the episode's deadline of {sitting.budget.seconds:g} s{_last(error)};"
                " check the model's server, allow more time (--deadline) or lower the load",
                kind="model_timeout",
                retryable=True,
                stage="model",
            ) from error
        except EpisodeError as error:
            error.stage = "model"
            raise


def _last(error: TimeoutError) -> str:
    """Return what the model's server answered last, which the interrupted call noted on its cancellation."""
    notes: list[str] = getattr(error.__cause__, "__notes__", [])
    return f" (the last attempt: {notes[-1]})" if notes else ""


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
