"""Check that the ids in a request belong together, for sessions with an id of the client.

NeMo Gym's typed bodies name a session by an id of the client and its episode. A request also names the session by its
cookie, and the rollout by its path. No field names the client itself, and a client that lost the answer to its seed
repeats the request without a cookie.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import OrderedDict
from typing import Any

from fastapi import Request

from gymsdk.edge.errors import RequestRejected
from gymsdk.edge.request import FORWARDED_HEADER, ClientConnection, Scope, get_state
from gymsdk.servers.requests import EpisodeId

CLIENT_HEADER = "x-gymsdk-client"
"""Request header that identifies gymsdk's own clients: a policy controls a request's arguments, but not its headers."""

RETRY_GRACE_SECONDS = 0.5
"""Seconds that a repeated request waits for the end of the connection on which the first answer was sent."""

ID_MISMATCH: dict[str, Any] = {"kind": "id_mismatch", "retryable": False}
"""Fields of a rejection when the ids of a request contradict each other."""


def check_rollout_path(episode: EpisodeId, scope: Scope) -> None:
    """Check that a path with the prefix `/ng-rollout/ID` names the rollout of an episode.

    Raises:
        RequestRejected: The path names another rollout.
    """
    rollout = get_state(scope).rollout_id
    if rollout is not None and not episode.includes(rollout):
        raise RequestRejected(
            409, f"the path names the rollout {rollout!r}, and the session belongs to {episode.key!r}", **ID_MISMATCH
        )


def check_cookie_id(cookie_id: str | None, named_id: str) -> None:
    """Check that the cookie of a request names no other session than its body.

    Args:
        cookie_id: The id of the cookie's session, if the cookie has one whose id the client chose.
        named_id: The id in the body.

    Raises:
        RequestRejected: The ids differ.
    """
    if cookie_id is not None and cookie_id != named_id:
        raise RequestRejected(
            409, f"the body names the session {named_id!r}, and the cookie the session {cookie_id!r}", **ID_MISMATCH
        )


class SessionClient:
    """The client that opened a session under an id that it chose.

    Args:
        request: The request that opened the session.
        episode: The episode that the session belongs to.

    Attributes:
        episode: The episode.
        has_returned: Whether a later request had the session's cookie, so that the client has the first answer.
    """

    def __init__(self, request: Request, episode: EpisodeId) -> None:
        self.episode = episode
        self.has_returned = False
        self._connection = _refer_to_connection(request)

    def confirm(self, scope: Scope) -> None:
        """Note a later request with the session's cookie or key.

        Raises:
            RequestRejected: The path of the request names another rollout.
        """
        check_rollout_path(self.episode, scope)
        self.has_returned = True

    async def accept_retry(self, request: Request, *, has_cookie: bool) -> bool:
        """Return whether a repeated request may come from the same client, and then expect later retries from it.

        A client repeats a request because it lost its connection before the answer arrived. Therefore, another client
        sent the request if the first connection is still open, or if the session's cookie has been used.

        Args:
            request: The repeated request.
            has_cookie: Whether the request has the session's cookie.
        """
        if not has_cookie and (self.has_returned or not await self._wait_for_disconnect()):
            return False
        self._connection = _refer_to_connection(request)
        return True

    async def _wait_for_disconnect(self) -> bool:
        """Return whether the connection of the first request ended, or is unknown."""
        connection = self._connection() if self._connection is not None else None
        if connection is None:
            return True
        ended = asyncio.Event()
        if not connection.add_disconnect_callback(ended.set):
            return True
        try:
            async with asyncio.timeout(RETRY_GRACE_SECONDS):
                return await ended.wait()
        except TimeoutError:
            return False
        finally:
            connection.remove_disconnect_callback(ended.set)


def _refer_to_connection(request: Request) -> weakref.ReferenceType[ClientConnection] | None:
    """Return a reference to the client's connection; `None` if another gymsdk server forwarded the request."""
    connection = get_state(request.scope).connection
    # Weak, so that a session does not keep a connection that has ended.
    return None if connection is None or FORWARDED_HEADER in request.headers else weakref.ref(connection)


class ClosedIds:
    """The ids of closed sessions, and the ids whose close arrived before their opening.

    Args:
        limit: How many ids are remembered.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._closed: OrderedDict[tuple[str, EpisodeId | None], tuple[EpisodeId | None, Any]] = OrderedDict()

    def add(self, name: str, episode: EpisodeId | None, reply: Any = None) -> None:
        """Remember a session that was open, with the reply to its close."""
        self._remember((name, None), episode, reply)

    def fence(self, name: str, episode: EpisodeId | None) -> None:
        """Keep a session from being opened that is unknown, of an episode; of any episode if that is `None`."""
        if (name, None) not in self._closed:
            self._remember((name, episode), episode, None)

    def may_open(self, name: str, episode: EpisodeId | None) -> bool:
        """Return whether a session with this id may be opened."""
        return (name, None) not in self._closed and (name, episode) not in self._closed

    def find_reply(self, name: str, episode: EpisodeId | None) -> Any:
        """Return the reply to the close of a session, `None` for an unknown one.

        Raises:
            RequestRejected: The session belonged to another episode.
        """
        owner, reply = self._closed.get((name, None), (None, None))
        check_episode(name, owner, episode)
        return reply

    def _remember(self, key: tuple[str, EpisodeId | None], episode: EpisodeId | None, reply: Any) -> None:
        self._closed[key] = episode, reply
        if len(self._closed) > self._limit:
            # The oldest: a client repeats a close within seconds, or never.
            self._closed.popitem(last=False)


def check_episode(name: str, owner: EpisodeId | None, named: EpisodeId | None) -> None:
    """Check that a session and the episode that a request names belong together; `None` stands for any episode.

    Raises:
        RequestRejected: The session belongs to another episode.
    """
    if owner is not None and named is not None and owner != named:
        raise RequestRejected(409, f"the session {name!r} belongs to another episode than {named.key!r}", **ID_MISMATCH)
