"""Opens, plays and judges the episodes behind the sessions of one environment."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from gymsdk import responses, tracing
from gymsdk.environment import Environment
from gymsdk.episode import (
    EpisodeRunner,
    JudgedEpisode,
    TurnResult,
    drop_unfinished_turn,
    verify_episode,
    verify_transcript,
)
from gymsdk.jsonl import dump_json
from gymsdk.plugins.results import copy_state
from gymsdk.responses import NOT_RUN_OUTPUT, TOKEN_FIELDS
from gymsdk.servers.errors import RequestRejected
from gymsdk.servers.requests import RowRequest, limit_budget, parse_task, play_without_nulls
from gymsdk.servers.session_clients import SessionClient
from gymsdk.servers.sessions import Session, SessionOrigin, SessionStore, find_session, is_judged
from gymsdk.types import Budget, EndReason, Episode, Item, Row, Transcript

JUDGED_WITHOUT_MESSAGE = "The response was judged without the session."
MISMATCH_ADVICE = (
    "The verdict of this environment depends on the session, so nothing was judged. Open a session for this row and"
    " play the row there, or send the row without the cookie to have it judged without a session."
)


MAX_BUDGET = Budget(turns=10_000, tools=10_000)
"""Largest budget of an episode without a client's budget, and of each episode that is judged."""

SessionKind: TypeAlias = Literal["tools", "typed", "turns"]
"""How a session is played: by tool calls (opened with a flat or a typed body), or turn by turn."""

SESSION_LOST: dict[str, Any] = {"stage": "step", "kind": "session_lost", "retryable": True}
"""Fields of a rejection that tell an agent to play the rollout again: it is lost, not bad."""

MAX_EARLIER_SESSIONS = 64
"""How many earlier sessions of a client are remembered with its newest one: the first, and the latest."""

SESSION_JUDGED: dict[str, Any] = {"stage": "step", "kind": "session_judged", "retryable": False}

SESSION_MISMATCH: dict[str, Any] = {"stage": "verify", "kind": "session_mismatch", "retryable": False}
"""Fields of a rejection when the response was not played in the cookie's session."""

OPENING_PATHS = {"tools": "/seed_session", "typed": "/seed_session", "turns": "/reset"}


class EpisodeService:
    """The episodes of one environment, each open in a session.

    Args:
        environment: The environment.
        sessions: The open sessions.
        budget: The largest budget of an episode.
    """

    def __init__(self, environment: Environment, sessions: SessionStore, budget: Budget | None = None) -> None:
        self.environment = environment
        self.sessions = sessions
        self._budget = budget or MAX_BUDGET

    async def open_session(
        self,
        request: RowRequest,
        kind: SessionKind,
        *,
        name: str | None = None,
        client: SessionClient | None = None,
        previous: Session | None = None,
        has_prompt: bool = True,
    ) -> Session:
        """Open a session with a new episode of a row.

        Args:
            request: The row and its options.
            kind: How the session will be played.
            name: The client's own id of the session.
            client: The client, if it chose the id.
            previous: The client's previous session; it stays open for a verdict.
            has_prompt: Whether the row includes the prompt.

        Raises:
            RequestRejected: The store is full, or the name was used before.
            BadRow: The row does not fit the environment.
        """
        await self.sessions.check_capacity(name, client)
        request.identity.compute()
        runner = EpisodeRunner(self.environment, self._limit_budget(request, kind))
        await play_without_nulls(
            request.row, lambda row: runner.open(row, seed=request.seed, id=request.id, repeat=request.repeat)
        )
        try:
            session = await self.sessions.open(runner, name=name, client=client)
        except BaseException:
            await runner.close()
            raise
        origin = SessionOrigin(
            request.identity, request.seed, typed=kind == "typed", prompted=has_prompt, seed_given=request.seed_given
        )
        session.extras |= {"kind": kind, "origin": origin}
        if previous is not None and not is_judged(previous):
            earlier = [*self._earlier_sessions(previous), previous]
            session.extras["earlier"] = (
                earlier if len(earlier) <= MAX_EARLIER_SESSIONS else [earlier[0], *earlier[1 - MAX_EARLIER_SESSIONS :]]
            )
        return session

    @asynccontextmanager
    async def lock_session(self, session: Session | None, *kinds: SessionKind) -> AsyncIterator[Session]:
        """Lock an open session that is played in one of the given ways.

        Raises:
            RequestRejected: The session does not exist, is closed or is played in another way.
        """
        if session is None:
            sentence = (
                f"the request has no session: POST a row to {OPENING_PATHS[kinds[0]]} first, then send its cookie"
            )
            raise RequestRejected(409, sentence, **SESSION_LOST)
        # A tool call carries no rollout id; the log takes it from the session.
        tracing.set_rollout_id(session.runner.episode.id if session.runner.episode else "")
        if session.extras["kind"] not in kinds:
            raise RequestRejected(
                409,
                f"this session was opened by {OPENING_PATHS[session.extras['kind']]}: use its endpoints",
            )
        async with session.lock:
            if self.sessions.find_by_token(session.token) is None:
                raise RequestRejected(409, "the session was closed meanwhile; open another", **SESSION_LOST)
            session.runner.restart_deadline()
            try:
                yield session
            finally:
                # Count the time of the call as use.
                self.sessions.find_by_token(session.token)

    @asynccontextmanager
    async def lock_playing_session(self, session: Session | None, *kinds: SessionKind) -> AsyncIterator[Session]:
        """Lock a session as `lock_session` does, to continue its episode.

        Raises:
            RequestRejected: As in `lock_session`, or the session was left or judged.
        """
        async with self.lock_session(session, *kinds) as locked:
            if locked.left:
                raise RequestRejected(409, "the session was closed; open another", **SESSION_LOST)
            if "judged" in locked.extras:
                raise RequestRejected(409, "the session was judged and is over; open another", **SESSION_JUDGED)
            yield locked

    async def leave_session(self, session: Session, *, trusted: bool) -> None:
        """Close a session; unless `trusted`, a policy may have asked, so an unjudged session waits for its verdict."""
        if trusted or is_judged(session):
            await self.sessions.close(session)
        else:
            self.sessions.close_soon(session)

    async def call_tool(self, session: Session, name: str, arguments: str) -> tuple[Item, TurnResult]:
        """Call a tool in the episode of a locked session.

        Returns:
            The output item, and the effects of the call.

        Raises:
            RequestRejected: The episode has no time left.
        """
        call = responses.build_function_call(name, arguments)
        if session.runner.is_over:
            return responses.build_function_call_output(call["call_id"], NOT_RUN_OUTPUT), TurnResult(ended="done")
        result = await session.runner.apply_response({"output": [call]})
        if not result.items:
            raise RequestRejected(503, f"the tool {name!r} had no time left", retry_after=1)
        return result.items[0], result

    async def judge(
        self, request: RowRequest, items: Sequence[Item], end_reason: EndReason, session: Session | None
    ) -> tuple[JudgedEpisode, Session | None, str | None]:
        """Judge a response as the episode of a row.

        A session of the same row provides its state. Judging does not change that state, but the session is over.
        Without a session the state is rebuilt if the verdict uses it.

        Args:
            request: The row and its options.
            items: The output of the response.
            end_reason: How the episode ended.
            session: The cookie's session, if there is one.

        Returns:
            The verdict, the session that was judged, and why the cookie's session was not judged.

        Raises:
            RequestRejected: The session was judged with another response, or the response was not played in it and the
                verdict depends on the state: a rebuilt state could differ.
        """
        if session is None:
            return await self._judge_without_session(request, items, end_reason), None, None
        async with self.lock_session(session, "tools", "typed", "turns"):
            played, reason = self._find_played_session(session, request, items)
            if played is session:
                return await self._judge_session(session, request, items, end_reason), session, reason
        if played is None:
            return await self._judge_without_session(request, items, end_reason), None, reason
        async with self.lock_session(played, "tools", "typed", "turns"):
            return await self._judge_session(played, request, items, end_reason), played, reason

    def _find_played_session(
        self, session: Session, request: RowRequest, items: Sequence[Item]
    ) -> tuple[Session | None, str | None]:
        """Return the session in which a response was played: the given one, or an earlier one of the same client.

        Raises:
            BadRow: The row does not fit the environment.
            RequestRejected: No session matches, and the verdict depends on the state.
        """
        match = find_session([*self._earlier_sessions(session), session], request, items, self.environment)
        if match.session is not None:
            return match.session, match.reason
        # A judged session of another row is over; the client has only kept its cookie.
        is_stale = not match.row_has_session and is_judged(session)
        if self.environment.needs_replay and not is_stale:
            parse_task(request.row, self.environment)
            raise RequestRejected(409, f"{match.reason} {MISMATCH_ADVICE}", **SESSION_MISMATCH)
        return None, f"{match.reason} {JUDGED_WITHOUT_MESSAGE}"

    def _earlier_sessions(self, session: Session) -> list[Session]:
        earlier: list[Session] = session.extras.get("earlier", [])
        return [candidate for candidate in earlier if self.sessions.is_open(candidate) and not is_judged(candidate)]

    async def _judge_session(
        self, session: Session, request: RowRequest, items: Sequence[Item], end_reason: EndReason
    ) -> JudgedEpisode:
        _fix_judged_response(session, items, end_reason)
        episode = session.runner.episode
        assert episode is not None, "a session is opened with its episode"
        origin: SessionOrigin = session.extras["origin"]
        copy = _copy_episode(episode, self.environment, request, has_prompt=origin.prompted)
        if session.extras["kind"] != "turns":
            # Replies never reach a tool endpoint, so a `step` hook that answers replies runs now.
            await self.environment.replay_into(copy, drop_unfinished_turn(items, end_reason), calls=False)
        return await verify_episode(self.environment, copy, items, end_reason)

    async def _judge_without_session(
        self, request: RowRequest, items: Sequence[Item], end_reason: EndReason
    ) -> JudgedEpisode:
        seconds = limit_budget(request.budget, self._budget).seconds

        async def judge(row: Row) -> JudgedEpisode:
            return await verify_transcript(
                self.environment,
                row,
                items,
                seed=request.seed,
                repeat=request.repeat,
                ended=end_reason,
                seconds=seconds,
            )

        return await play_without_nulls(request.row, judge)

    def _limit_budget(self, request: RowRequest, kind: SessionKind) -> Budget:
        budget = limit_budget(request.budget, self._budget)
        # Each tool call arrives alone; only the client knows how they group into turns.
        return budget if kind == "turns" else budget.model_copy(update={"turns": MAX_BUDGET.turns})


def _fix_judged_response(session: Session, items: Sequence[Item], end_reason: EndReason) -> None:
    """Allow only one response to be judged in a session; judging the same response again is allowed."""
    # The texts and calls tell responses apart; the token ids would take as long as a parse of the body.
    content = [{key: value for key, value in item.items() if key not in TOKEN_FIELDS} for item in items]
    digest = hashlib.sha256(dump_json([end_reason, *content])).digest()
    if session.extras.setdefault("judged", digest) != digest:
        raise RequestRejected(
            409, "the session was judged with another response: open another session for this one", **SESSION_JUDGED
        )


def _copy_episode(episode: Episode, environment: Environment, request: RowRequest, *, has_prompt: bool) -> Episode:
    """Copy an episode for judging; if it was opened without the prompt, the row of the request provides the prompt."""
    opening = list(episode.transcript.opening)
    task = episode.task if has_prompt else parse_task(request.row, environment)
    return replace(
        episode,
        task=task,
        state=copy_state(episode.state) if environment.needs_replay else episode.state,
        transcript=Transcript(opening=opening if has_prompt else [*task.input, *opening]),
        deadline=asyncio.get_running_loop().time() + MAX_BUDGET.seconds,
    )
