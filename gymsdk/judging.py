"""Judging: a finished transcript, judged as an episode of its row that is opened for that alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from gymsdk import sitting
from gymsdk.environment import Environment
from gymsdk.errors import EpisodeError
from gymsdk.transcript import Ended, Item
from gymsdk.turns import of_policy, spans
from gymsdk.types import Episode, Row, Verdict

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class Judged:
    """A verdict, what the steps *paid* beside it, and how the episode that was judged *ended*."""

    verdict: Verdict
    paid: float
    ended: Ended

    @property
    def reward(self) -> float:
        """The whole reward."""
        return self.verdict.reward + self.paid

    @property
    def components(self) -> dict[str, float]:
        """What adds up to it."""
        return sitting.components(self.verdict, self.paid)

    @property
    def fields(self) -> Item:
        """The verdict's own fields as plain JSON."""
        return self.verdict.model_dump(mode="json", exclude={"reward", "components"})


async def judged(
    environment: Environment,
    row: Row,
    items: Sequence[Item],
    *,
    seed: int,
    ended: Ended,
    seconds: float,
    repeat: int = 0,
    opening: list[Item] | None = None,
) -> Judged:
    """Give the verdict on *items* as the episode of *row* that has *ended*: opened, judged and closed.

    Where the verdict takes more than the transcript, the actions are played again, within *seconds*. The policy was
    shown *opening*, where that is known. Raises `BadRow` where the row does not fit, else `EpisodeError`.
    """
    deadline = asyncio.get_running_loop().time() + seconds
    episode = await environment.reset(row, seed=seed, repeat=repeat, deadline=deadline)
    try:
        if opening is not None:
            episode.transcript.opening = opening
        if environment.needs_replay:
            await environment.replay_into(episode, played(items, ended))
        return await told(environment, episode, items, ended)
    finally:
        await _close(environment, episode)


async def told(environment: Environment, episode: Episode, items: Sequence[Item], ended: Ended) -> Judged:
    """Give the verdict on *items* as what was said in *episode*, open and played as far as they go."""
    episode.transcript.items = list(items)
    episode.transcript.ended = ended
    return Judged(await environment.verify(episode), episode.paid, ended)


def played(items: Sequence[Item], ended: Ended) -> Sequence[Item]:
    """Give *items* as far as they were played: a turn that the model did not finish is shown to nobody."""
    if ended != "tokens" or not items or not of_policy(items[-1]):
        return items
    *_, last = spans(items)
    return items[: last.start]


async def _close(environment: Environment, episode: Episode) -> None:
    try:
        await environment.close(episode)
    except EpisodeError as error:
        # The verdict stands: what was graded does not change because the cleaning up failed.
        log.warning("an episode opened to be judged: %s", error)
