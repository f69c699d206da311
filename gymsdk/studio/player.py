"""Replay and branch rollouts for the pages of the viewer; only with `gymsdk view --play`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from gymsdk.errors import UsageError
from gymsdk.rollouts.replay import Replayed, parse_turn
from gymsdk.runs import read
from gymsdk.runs.replay import BranchOptions, Replayer
from gymsdk.types import Row

MAX_REPEATS = 16
"""The most repeats of a branch that a page asks for."""


class Player:
    """Plays stored rollouts again, one request at a time.

    Args:
        base_urls: The addresses of the models that play on. A page cannot choose others, because the API keys of this
            process's environment are sent there.
    """

    def __init__(self, base_urls: Sequence[str] | None = None) -> None:
        self._base_urls = base_urls
        self._lock = asyncio.Lock()

    async def replay(self, path: Path, name: str, *, force: bool) -> Row:
        """Return whether a rollout is the same when it is played again.

        Args:
            path: The run.
            name: The rollout, `TASK:REPEAT`.
            force: Go on after the environment has answered differently.

        Raises:
            GymsdkError: The rollout cannot be replayed.
        """

        # In a thread with its own event loop: replaying reads files and calls the hooks of an environment.
        def play() -> Row:
            with read(path) as run:
                replayer = Replayer(run, force=force)
                [replayed] = asyncio.run(replayer.replay([replayer.read_episode(name)]))
            return {"is_equal": replayed.is_equal} | _describe(replayed)

        async with self._lock:
            return await asyncio.to_thread(play)

    async def branch(self, path: Path, name: str, request: Row) -> tuple[Path, list[Row]]:
        """Continue a rollout differently, and write the result as a run.

        Args:
            path: The run.
            name: The rollout, `TASK:REPEAT`.
            request: `turn`: the number of stored turns that are said before. `say`: the text of the next turn, or JSON
                with its items. `model`: the model that plays on. `repeats`, and `force`.

        Returns:
            The folder of the new run, and the result of each repeat.

        Raises:
            GymsdkError: The rollout cannot be branched, or the request is wrong.
        """
        options, force = self._parse_options(request)

        def play() -> tuple[Path, list[Row]]:
            with read(path) as run:
                replayer = Replayer(run, force=force)
                branch, replays = asyncio.run(replayer.branch(replayer.read_episode(name), options))
                folder = replayer.create_folder()
                replayer.write(branch, replays, folder, then=options.then)
            return folder, [_describe(replay) for replay in replays]

        async with self._lock:
            return await asyncio.to_thread(play)

    def _parse_options(self, request: Row) -> tuple[BranchOptions, bool]:
        turn, repeats = request.get("turn"), request.get("repeats") or 1
        if not isinstance(turn, int) or turn < 0:
            raise UsageError("`turn` must be a number of turns")
        if not isinstance(repeats, int) or not 1 <= repeats <= MAX_REPEATS:
            raise UsageError(f"`repeats` must be a number from 1 to {MAX_REPEATS}")
        say, then = (request.get(key) or "" for key in ("say", "model"))
        if not isinstance(say, str) or not isinstance(then, str):
            raise UsageError("`say` and `model` must be texts")
        if not say.strip() and not then.strip():
            raise UsageError("write the next turn, or name a model that plays on")
        items = parse_turn(say.encode("utf-8", "replace"), where="the next turn") if say.strip() else ()
        return BranchOptions(turn, items, then.strip() or None, self._base_urls, repeats), bool(request.get("force"))


def _describe(replayed: Replayed) -> Row:
    failure = replayed.rollout.failure
    return {
        "reward": None if failure else replayed.rollout.reward,
        "stored_reward": replayed.stored.reward,
        "turns": replayed.rollout.turns,
        "diverged": replayed.diverged,
        "failure": failure.message if failure else None,
    }
