"""Episodes: what opens, calls and judges the sessions' episodes of one environment."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from gymsdk import judging, trail, wire
from gymsdk.environment import Environment
from gymsdk.judging import Judged
from gymsdk.plugins import answers
from gymsdk.servers.app import Refused
from gymsdk.servers.sessions.held import Session, Sessions
from gymsdk.servers.sessions.intake import Given, task_of, tolerant, within
from gymsdk.servers.sessions.matching import (
    JUDGED_WITHOUT,
    WHAT_TO_DO,
    Opening,
    find,
    over,
)
from gymsdk.sitting import Budget, Sitting, Taken
from gymsdk.transcript import Ended, Item, Transcript
from gymsdk.turns import NOT_RUN
from gymsdk.types import Episode, Row
from gymsdk.values import written

MOST = Budget(turns=10_000, tools=10_000)
"""What an episode may use whose client has named no budget: it keeps one of its own."""

Face: TypeAlias = Literal["tools", "typed", "turns"]
"""How a session is played: by its tools (opened by the typed body or not), or turn by turn."""

LOST: dict[str, Any] = {"stage": "step", "kind": "session_lost", "retryable": True}
"""What tells an agent that a refusal is no tool's answer: its rollout is lost, not bad."""

BEFORE = 64
"""How many sessions that a client left for another are remembered with that one: the first, and the latest."""

OVER: dict[str, Any] = {"stage": "step", "kind": "session_judged", "retryable": False}

MISMATCH: dict[str, Any] = {"stage": "verify", "kind": "session_mismatch", "retryable": False}
"""What a refusal says where the cookie names a session that cannot be the one the response was played in."""

SEEDS = {"tools": "/seed_session", "typed": "/seed_session", "turns": "/reset"}


class Episodes:
    """The episodes of *environment*, each open in one of *sessions*."""

    def __init__(self, environment: Environment, sessions: Sessions, budget: Budget | None = None) -> None:
        self.environment = environment
        self.sessions = sessions
        self._budget = budget or MOST

    async def open_session(
        self, given: Given, face: Face, *, name: str | None = None, left: Session | None = None, prompted: bool = True
    ) -> Session:
        """Give a new session of an episode of the *given* row; a client may *name* it. Raises `Refused`.

        One that its client *left* for it is still there for the verdict: who asked for another may have been a policy.
        """
        await self.sessions.check_capacity(name)
        played = Sitting(self.environment, self._limit_budget(given, face))
        await tolerant(given.row, lambda row: played.open(row, seed=given.seed, id=given.id, repeat=given.repeat))
        try:
            session = await self.sessions.open(played, name=name)
        except BaseException:
            await played.close()
            raise
        opening = Opening(
            given.identity, given.seed, typed=face == "typed", prompted=prompted, seed_given=given.seed_given
        )
        session.extras |= {"face": face, "opening": opening}
        if left is not None and not over(left):
            before = [*self._earlier_sessions(left), left]
            session.extras["before"] = before if len(before) <= BEFORE else [before[0], *before[1 - BEFORE :]]
        return session

    @asynccontextmanager
    async def lock_session(self, session: Session | None, *faces: Face) -> AsyncIterator[Session]:
        """Have *session* to oneself, if it is open and played by one of these *faces*; raises `Refused`."""
        if session is None:
            sentence = f"there is no session: POST a row to {SEEDS[faces[0]]} first, then send its cookie"
            raise Refused(409, sentence, **LOST)
        # Tools bring nothing but their arguments: whose they are, the session knows.
        trail.name(session.sitting.episode.id if session.sitting.episode else "")
        if session.extras["face"] not in faces:
            raise Refused(409, f"this session was opened by {SEEDS[session.extras['face']]}: go on as that has it")
        async with session.lock:
            if self.sessions.find_by_token(session.token) is None:
                raise Refused(409, "the session has been closed meanwhile; open another", **LOST)
            session.sitting.restart_deadline()
            try:
                yield session
            finally:
                # In use until now.
                self.sessions.find_by_token(session.token)

    @asynccontextmanager
    async def lock_playing_session(self, session: Session | None, *faces: Face) -> AsyncIterator[Session]:
        """Have *session* to oneself as `held` does, to go on in it: one that was left or judged is over."""
        async with self.lock_session(session, *faces) as mine:
            if mine.left:
                raise Refused(409, "the session has been closed; open another", **LOST)
            if "judged" in mine.extras:
                raise Refused(409, "the session has been judged: nothing happens in it any more; open another", **OVER)
            yield mine

    async def leave_session(self, session: Session, *, trusted: bool) -> None:
        """Close *session*; unless *trusted*, it may be a policy that wants it so, and a verdict is waited for."""
        if trusted or over(session):
            await self.sessions.close(session)
        else:
            self.sessions.close_soon(session)

    async def call_tool(self, session: Session, name: str, arguments: str) -> tuple[Item, Taken]:
        """Give what answers a tool call in this session's episode, which its caller holds, and what came of it."""
        call = wire.function_call(name, arguments)
        if session.sitting.is_over:
            return wire.function_call_output(call["call_id"], NOT_RUN), Taken(ended="done")
        taken = await session.sitting.apply_response({"output": [call]})
        if not taken.items:
            raise Refused(503, f"the tool {name!r} had no time left", retry_after=1)
        return taken.items[0], taken

    async def judge(
        self, given: Given, items: Sequence[Item], ended: Ended, session: Session | None
    ) -> tuple[Judged, Session | None, str | None]:
        """Judge *items* as the episode of the *given* row.

        A session of the same row brings its state; judging does not change that state, but the session is over.
        Without a session the state is rebuilt where the verdict takes it.

        Returns:
            The verdict, the session that was judged, and why the one of the cookie was not.

        Raises:
            Refused: another response was judged in the session before, or *session* cannot be the one that *items* were
                played in and the verdict takes the state: a state that was rebuilt might be another.
        """
        if session is None:
            return await self._judge_without_session(given, items, ended), None, None
        async with self.lock_session(session, "tools", "typed", "turns"):
            found, why = self._find_played_session(session, given, items)
            if found is session:
                return await self._judge_session(session, given, items, ended), session, why
        if found is None:
            return await self._judge_without_session(given, items, ended), None, why
        async with self.lock_session(found, "tools", "typed", "turns"):
            return await self._judge_session(found, given, items, ended), found, why

    def _find_played_session(self, session: Session, given: Given, items: Sequence[Item]) -> tuple[Session | None, str | None]:
        """Return the session in which *items* were played: *session*, or one that its client left for it.

        Raises:
            BadRow: The given row does not fit the environment.
            Refused: None of them is the one, and the verdict takes the state.
        """
        match = find([*self._earlier_sessions(session), session], given, items, self.environment)
        if match.session is not None:
            return match.session, match.why
        # A session of another row that has its verdict is over: its cookie is left from before.
        left_over = not match.row_has_session and over(session)
        if self.environment.needs_replay and not left_over:
            task_of(given.row, self.environment)
            raise Refused(409, f"{match.why} {WHAT_TO_DO}", **MISMATCH)
        return None, f"{match.why} {JUDGED_WITHOUT}"

    def _earlier_sessions(self, session: Session) -> list[Session]:
        before: list[Session] = session.extras.get("before", [])
        return [each for each in before if self.sessions.is_open(each) and not over(each)]

    async def _judge_session(self, session: Session, given: Given, items: Sequence[Item], ended: Ended) -> Judged:
        _fence(session, items, ended)
        episode = session.sitting.episode
        assert episode is not None, "it has been opened"
        opening: Opening = session.extras["opening"]
        copy = _copy(episode, self.environment, given, prompted=opening.prompted)
        if session.extras["face"] != "turns":
            # No endpoint brings a reply: those of an author who answers them are played now.
            await self.environment.replay_into(copy, judging.played(items, ended), calls=False)
        return await judging.told(self.environment, copy, items, ended)

    async def _judge_without_session(self, given: Given, items: Sequence[Item], ended: Ended) -> Judged:
        seconds = within(given.budget, self._budget).seconds

        async def judge(row: Row) -> Judged:
            return await judging.judged(
                self.environment, row, items, seed=given.seed, repeat=given.repeat, ended=ended, seconds=seconds
            )

        return await tolerant(given.row, judge)

    def _limit_budget(self, given: Given, face: Face) -> Budget:
        budget = within(given.budget, self._budget)
        # Each call comes by itself: how many turns they were is known to the client alone.
        return budget if face == "turns" else budget.model_copy(update={"turns": MOST.turns})


def _fence(session: Session, items: Sequence[Item], ended: Ended) -> None:
    """Have *session* be judged for these *items* alone, however often it is asked for; raises `Refused`."""
    mark = hashlib.sha256(written([ended, *items])).digest()
    if session.extras.setdefault("judged", mark) != mark:
        raise Refused(409, "the session was judged with another response: open another session for this one", **OVER)


def _copy(episode: Episode, environment: Environment, given: Given, *, prompted: bool) -> Episode:
    """Give a copy of *episode* to be judged; where it was not *prompted*, the *given* row's prompt opens it."""
    opening = list(episode.transcript.opening)
    task = episode.task if prompted else task_of(given.row, environment)
    return replace(
        episode,
        task=task,
        state=answers.copied(episode.state) if environment.needs_replay else episode.state,
        transcript=Transcript(opening=opening if prompted else [*task.input, *opening]),
        deadline=asyncio.get_running_loop().time() + MOST.seconds,
    )
