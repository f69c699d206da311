"""The oracle for those who bring a conversation and no episode: it finds the row that opens like it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self

from gymsdk import recordings
from gymsdk.environment import Environment
from gymsdk.errors import Failed
from gymsdk.models.scripted import Scripted
from gymsdk.recorder import BUDGET, LIMIT, Recorder, of_file, of_splits, unpacked
from gymsdk.recordings import Recording
from gymsdk.rollouts.sources import Environments, Sourced, one_source
from gymsdk.sitting import Sitting
from gymsdk.transcript import Item
from gymsdk.turns import spans
from gymsdk.types import Episode, Model

NAMED = "scripted/oracle"
"""How the names of the models begin that need an episode."""

WAIT = 10.0
"""Seconds a request may wait for its row to be read."""


ADVICE = (
    "start the oracle with the --seed, --set and --split of whoever asks, with a higher --limit, or with the file of"
    " its rows: --tasks FILE"
)
"""What helps where it knows no row that opens like a conversation, and how it was started is up to its user."""

SERVED = (
    "POST the row to /run of an agent with the oracle in its process (`gymsdk serve` without --separate and --role), or"
    " let `gymsdk policy serve oracle --env NAME` play, which takes --seed, --set, --split and --tasks of whoever asks"
)
"""What helps where it plays behind a model server, and reads all splits with the seed 0."""


class Oracle(Scripted):
    """*model*, which plays episodes of *environments*, for those as well who bring a conversation alone.

    A conversation is answered as the first of *sources*' rows was that opens like it and went like it so far; one
    that none went like, by the model in an episode of such a row that has come as far. Rows are read as they are
    needed, at most *limit*, and a request waits for that at most *wait* seconds.
    """

    def __init__(
        self,
        model: Model,
        environments: Environments,
        sources: Sequence[Sourced],
        *,
        limit: int = LIMIT,
        seed: int = 0,
        wait: float = WAIT,
        advice: str = ADVICE,
    ) -> None:
        super().__init__(str(getattr(model, "name", NAMED)).removeprefix("scripted/"), self._said)
        self._model = model
        self._environments = environments
        self._recorder = Recorder(environments, model, sources, limit=limit, seed=seed)
        self._wait = wait
        self._advice = advice

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the rows that are being read."""
        await self._recorder.aclose()

    async def _said(self, request: Item, episode: Episode | None) -> list[Item]:
        # An episode that is played against a server knows no more than its conversation.
        if episode is not None and hasattr(episode.environment, "solve"):
            return await self._asked(request, episode)
        history = recordings.history(request)
        found, marks = await self._found(request)
        turn = found.find_turn(marks[-1])
        if turn is not None:
            return found.get_turn(turn)
        starts = [*(span.start for span in spans(history)), len(history)]
        return await self._played(found, request, history[starts[marks.index(found.digests[0])] :])

    async def _found(self, request: Item) -> tuple[Recording, list[bytes]]:
        """Return the recording that *request* follows, once its row has been read, and the marks by which it does."""
        clock = asyncio.get_running_loop().time
        ends, conversation = clock() + self._wait, recordings.Conversation(request)
        while True:
            marks = conversation.find_digests(self._recorder.found)
            if marks is not None and (found := self._recorder.found.find_next_turn(marks)) is not None:
                return found[0], marks
            if self._recorder.over:
                raise self._unknown()
            if clock() >= ends:
                told = f"no row read so far opens like this conversation (read: {self._recorder.story})"
                told = f"{told}; ask again, or {self._advice}"
                raise Failed(told, kind="still_reading", retryable=True, retry_after=1.0)
            await self._recorder.more(ends - clock())

    async def _played(self, found: Recording, request: Item, items: Sequence[Item]) -> list[Item]:
        """Give what the model says in an episode of the row that has come as far as *items*."""
        environment = self._environments[found.environment]
        sitting = Sitting(environment, BUDGET)
        try:
            episode = await sitting.open(unpacked(found.row), seed=found.seed)
            await environment.replay_into(episode, items)
            if episode.done:
                raise Failed("the episode is over: a perfect policy has nothing more to say", kind="not_recorded")
            return await self._asked(request, episode)
        finally:
            await sitting.close()

    async def _asked(self, request: Item, episode: Episode) -> list[Item]:
        output: list[Item] = (await self._model.respond(request, episode=episode))["output"]
        return output

    def _unknown(self) -> Failed:
        return Failed(
            f"no row opens like this conversation (read: {self._recorder.story}); {self._advice}",
            kind="not_recorded",
        )


def served(model: Model, environments: Sequence[Environment]) -> Model:
    """Give *model* as a server of it can use it: one that needs an episode finds it among the rows of all splits."""
    if isinstance(model, Oracle) or not (isinstance(model, Scripted) and model.name.startswith(NAMED)):
        return model
    named = {each.name: each for each in environments}
    return Oracle(model, named, of_splits(named), advice=SERVED)


@asynccontextmanager
async def opened(
    environments: Environments,
    model: Model,
    *,
    split: str | None = None,
    tasks: Path | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> AsyncIterator[Oracle]:
    """Open the oracle over *environments*: the rows of all splits, of one *split*, or of the file *tasks*.

    Raises `UsageError` where there are none to be had.
    """
    one_source(tasks, split)
    sources = of_splits(environments, split, seed=seed) if tasks is None else of_file(environments, tasks)
    async with AsyncExitStack() as entered:
        for environment in environments.values():
            await entered.enter_async_context(environment)
        yield await entered.enter_async_context(Oracle(model, environments, sources, limit=limit or LIMIT, seed=seed))
