"""Episodes: what opens, calls and judges the sessions' episodes of one environment."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from gymsdk import sitting, wire
from gymsdk.environment import Environment
from gymsdk.errors import BadRow, EpisodeError
from gymsdk.plugins import answers
from gymsdk.servers.app import Refused
from gymsdk.servers.intake import Given, own, without_nulls
from gymsdk.servers.sessions import Session, Sessions
from gymsdk.sitting import Budget, Sitting, Taken
from gymsdk.transcript import Ended, Item, Transcript
from gymsdk.turns import NOT_RUN, of_policy, spans
from gymsdk.types import Episode, Row, Verdict

MOST = Budget(turns=10_000, tools=10_000)
"""What an episode may use whose client has named no budget: it keeps one of its own."""

Face: TypeAlias = Literal["tools", "typed", "turns"]
"""How a session is played: by its tools (opened by the typed body or not), or turn by turn."""

LOST: dict[str, Any] = {"stage": "step", "kind": "session_lost", "retryable": True}
"""What tells an agent that a refusal is no tool's answer: its rollout is lost, not bad."""

SEEDS = {"tools": "/seed_session", "typed": "/seed_session", "turns": "/reset"}

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


class Episodes:
    """The episodes of *environment*, each open in one of *sessions*."""

    def __init__(self, environment: Environment, sessions: Sessions, budget: Budget | None = None) -> None:
        self.environment = environment
        self.sessions = sessions
        self._budget = budget or MOST

    async def seed(self, given: Given, face: Face, *, name: str | None = None) -> Session:
        """Give a new session of an episode of the *given* row; a client may *name* it. Raises `Refused`."""
        await self.sessions.check(name)
        played = Sitting(self.environment, self._allowed(given, face))
        await _tolerant(given.row, lambda row: played.open(row, seed=given.seed, id=given.id, repeat=given.repeat))
        try:
            session = await self.sessions.open(played, name=name)
        except BaseException:
            await played.close()
            raise
        session.kept |= {"face": face, "own": own(given.row), "prompted": True}
        return session

    @asynccontextmanager
    async def held(self, session: Session | None, *faces: Face) -> AsyncIterator[Session]:
        """Have *session* to oneself, if it is open and played by one of these *faces*; raises `Refused`."""
        if session is None:
            sentence = f"there is no session: POST a row to {SEEDS[faces[0]]} first, then send its cookie"
            raise Refused(409, sentence, **LOST)
        if session.kept["face"] not in faces:
            raise Refused(409, f"this session was opened by {SEEDS[session.kept['face']]}: go on as that has it")
        async with session.lock:
            if self.sessions.found(session.token) is None:
                raise Refused(409, "the session has been closed meanwhile; open another", **LOST)
            session.sitting.extend()
            yield session

    async def call(self, session: Session, name: str, arguments: str) -> tuple[Item, Taken]:
        """Give what answers a tool call in this session's episode, which its caller holds, and what came of it."""
        call = wire.function_call(name, arguments)
        if session.sitting.over:
            return wire.function_call_output(call["call_id"], NOT_RUN), Taken(ended="done")
        taken = await session.sitting.answer({"output": [call]})
        if not taken.items:
            raise Refused(503, f"the tool {name!r} had no time left", retry_after=1)
        return taken.items[0], taken

    async def judge(self, given: Given, items: Sequence[Item], ended: Ended, session: Session | None) -> Judged:
        """Give the verdict on *items* as the episode of the *given* row.

        A session of the same row, held by the caller, brings its state; what that session keeps does not change by
        it. Without one the state is rebuilt where the verdict takes one.
        """
        episode = session.sitting.episode if session is not None and _fits(session, given, items) else None
        if session is None or episode is None:
            return await self._alone(given, items, ended)
        copy = _copy(episode, self.environment, given, prompted=session.kept["prompted"])
        if session.kept["face"] == "turns":
            copy.transcript.items = list(items)
        else:
            # No endpoint brings a reply: those of an author who answers them are played now.
            await self.environment.follow(copy, _played(items, ended), calls=False)
            copy.transcript.items = list(items)
        return await self._judged(copy, ended)

    async def _alone(self, given: Given, items: Sequence[Item], ended: Ended) -> Judged:
        episode = await self._rebuilt(given, items, ended)
        try:
            return await self._judged(episode, ended)
        finally:
            await _close(self.environment, episode)

    async def _rebuilt(self, given: Given, items: Sequence[Item], ended: Ended) -> Episode:
        deadline = asyncio.get_running_loop().time() + (given.budget or self._budget).seconds
        again = _played(items, ended) if self.environment.remembers else []
        replay = self.environment.replay
        episode = await _tolerant(given.row, lambda row: replay(row, again, seed=given.seed, deadline=deadline))
        episode.transcript.items = list(items)
        return episode

    def _allowed(self, given: Given, face: Face) -> Budget:
        budget = given.budget or self._budget
        # Each call comes by itself: how many turns they were is known to the client alone.
        return budget if face == "turns" else budget.model_copy(update={"turns": MOST.turns})

    async def _judged(self, episode: Episode, ended: Ended) -> Judged:
        episode.transcript.ended = ended
        return Judged(await self.environment.verify(episode), episode.paid, ended)


async def _tolerant(row: Row, play: Callable[[Row], Awaitable[Episode]]) -> Episode:
    """Give the episode that *play* makes of *row*: as it is, or where that does not fit, without its nulls."""
    try:
        return await play(row)
    except BadRow:
        bare = without_nulls(row)
        if bare == row:
            raise
        return await play(bare)


def _fits(session: Session, given: Given, items: Sequence[Item]) -> bool:
    """Whether *session* is one of the *given* row that has seen what was called in *items*, if anything was."""
    same: bool = session.kept["own"] == own(given.row)
    episode = session.sitting.episode
    called = any(item.get("type") == "function_call_output" for item in items)
    return same and episode is not None and (bool(episode.transcript.items) or not called)


def _played(items: Sequence[Item], ended: Ended) -> Sequence[Item]:
    """Give *items* as far as they were played: a turn that the model did not finish is shown to nobody."""
    if ended != "tokens" or not items or not of_policy(items[-1]):
        return items
    *_, last = spans(items)
    return items[: last.start]


def _copy(episode: Episode, environment: Environment, given: Given, *, prompted: bool) -> Episode:
    """Give a copy of *episode* to be judged; where it was not *prompted*, the *given* row's prompt opens it."""
    opening = list(episode.transcript.opening)
    task = episode.task if prompted else environment.read(given.row)
    return replace(
        episode,
        task=task,
        state=answers.copied(episode.state) if environment.remembers else episode.state,
        transcript=Transcript(opening=opening if prompted else [*task.input, *opening]),
        deadline=asyncio.get_running_loop().time() + MOST.seconds,
    )


async def _close(environment: Environment, episode: Episode) -> None:
    try:
        await environment.close(episode)
    except EpisodeError as error:
        # The verdict stands: what was graded does not change because the cleaning up failed.
        log.warning("an episode judged without a session: %s", error)
