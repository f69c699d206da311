"""Replay the rollouts of a stored run with its environments and their settings, and write branches as runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gymsdk.environment import Environment
from gymsdk.errors import BadOutput, UsageError
from gymsdk.http import client
from gymsdk.models.registry import model
from gymsdk.plugins import registry
from gymsdk.rollouts.folder import RunFolder, create_dated_folder
from gymsdk.rollouts.inputs import InputIndex
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.replay import (
    Branch,
    Replayed,
    StoredEpisode,
    open_environments,
    parse_episode,
    replay,
    write_branches,
)
from gymsdk.runs import Run
from gymsdk.runs.source import find_read_error, open_regular
from gymsdk.types import Budget, Item, Row
from gymsdk.working_folder import shorten_path

MAX_CONCURRENCY = 16
"""The number of replays that are played at the same time."""


@dataclass(frozen=True)
class BranchOptions:
    """How a rollout continues differently.

    Attributes:
        turn: The number of stored turns that are said before; `None` for all.
        say: The items of the turn that is said next; empty for none.
        then: The name of the model that plays on; `None` for none.
        base_urls: The addresses of the model.
        repeats: How often the branch is played.
    """

    turn: int | None = None
    say: Sequence[Item] = ()
    then: str | None = None
    base_urls: Sequence[str] | None = None
    repeats: int = 1


@dataclass
class Replayer:
    """Plays stored rollouts of a run again.

    Attributes:
        run: The run.
        settings: Settings of the environments that replace those of the run, by the names of the environments.
        force: Go on after an environment has answered differently.
    """

    run: Run
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    force: bool = False

    @cached_property
    def inputs(self) -> InputIndex:
        """The rows as sent; empty if the run has none."""
        path = self.run.source.inputs
        if why := find_read_error(path):
            raise UsageError(f"{shorten_path(path)} cannot be read: {why}")
        index = InputIndex(path, open_file=open_regular)
        return index.read() if path.exists() else index

    def read_episode(self, name: str) -> StoredEpisode:
        """Return the stored episode `TASK:REPEAT`; raises `UsageError` if it cannot be replayed."""
        row = self.run.queries.find(name)
        if row is None:
            raise UsageError(f"{self.run.source.path} has no rollout {name!r}; `gymsdk show` lists some")
        return self._read_episode(row)

    def read_scored_episodes(self) -> Iterator[StoredEpisode]:
        """Yield all stored episodes with a reward; raises `UsageError` if there is none."""
        rows = (row for row in self.run.iter_rows() if row["reward"] is not None)
        found = [self._read_episode(row) for row in rows]
        if not found:
            raise UsageError(f"{self.run.source.path} has no rollout with a reward")
        yield from found

    def _read_episode(self, row: Row) -> StoredEpisode:
        stored = self.run.queries.read(row["id"])
        stored.sent = self.inputs.find(*stored.key)
        return parse_episode(stored)

    async def replay(self, episodes: Sequence[StoredEpisode]) -> list[Replayed]:
        """Play *episodes* as they are stored."""
        return await self._play(episodes, None)

    async def branch(self, episode: StoredEpisode, options: BranchOptions) -> tuple[Branch, list[Replayed]]:
        """Continue *episode* differently.

        Returns:
            The branch, and a replay for each repeat.

        Raises:
            UsageError: The episode has fewer turns, or there is no such model.
        """
        most = len(episode.turns)
        turn = most if options.turn is None else options.turn
        if turn > most:
            raise UsageError(f"rollout {episode.id} has fewer turns than {turn}: {most}")
        player = model(options.then, base_url=options.base_urls) if options.then else None
        branch = Branch(turn, options.say, player)
        return branch, await self._play([episode] * options.repeats, branch)

    def write(
        self,
        branch: Branch,
        replays: Sequence[Replayed],
        folder: Path,
        *,
        then: str | None = None,
        overwrite: bool = False,
    ) -> None:
        """Write the replays of a branch to *folder* as a run.

        Args:
            branch: The branch.
            replays: Its replays.
            folder: The folder.
            then: The name of the model that has played on.
            overwrite: Whether a run in *folder* is replaced.

        Raises:
            BadOutput: The folder holds a run.
        """
        plan = Plan(environments={replays[0].stored.environment: {}}, model=then or "edited")
        with RunFolder(folder) as opened:
            if opened.holds_run and not overwrite:
                raise BadOutput(
                    f"{shorten_path(folder)} holds a run; replace it with --overwrite, or choose another --output"
                )
            write_branches(opened, plan, replays, self.run.name, branch)

    def create_folder(self) -> Path:
        """Create a folder for a branch of this run, with the date and time in its name, and return its path."""
        return create_dated_folder(["branch", self.run.name])

    async def _play(self, episodes: Sequence[StoredEpisode], branch: Branch | None) -> list[Replayed]:
        environments = self._load_environments(episodes)
        budget = Budget.model_validate(self.run.settings.get("budget") or {})
        limit = asyncio.Semaphore(MAX_CONCURRENCY)

        async def play_one(episode: StoredEpisode) -> Replayed:
            async with limit:
                return await replay(environments[episode.environment], episode, branch, budget=budget, force=self.force)

        try:
            async with open_environments(list(environments.values())):
                return await asyncio.gather(*map(play_one, episodes))
        finally:
            await client.aclose()

    def _load_environments(self, episodes: Sequence[StoredEpisode]) -> dict[str, Environment]:
        described = self.run.settings.get("environments") or {}
        return {
            name: registry.load(
                name, **{**((described.get(name) or {}).get("settings") or {}), **self.settings.get(name, {})}
            )
            for name in dict.fromkeys(episode.environment for episode in episodes)
        }
