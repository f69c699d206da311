"""Routing of model requests among replicas: a conversation stays with one replica, and moves if that one fails."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from typing import Any, TypeAlias

from pydantic import SecretStr

from gymsdk.errors import Failed
from gymsdk.http import client as http
from gymsdk.responses import is_policy_item
from gymsdk.types import Episode, Item, extract_text

log = logging.getLogger("gymsdk")

STICKY_KEY: ContextVar[str | None] = ContextVar("gymsdk_sticky", default=None)
"""A key that the requests of one conversation share, if the server knows one from its client."""

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""How long a failed replica receives no requests; the pause doubles while the replica stays down."""

UNAVAILABLE_STATUSES = frozenset({502, 503, 504})
"""The statuses with which a proxy reports that the server behind it is down."""

MISROUTED_STATUSES = frozenset({401, 403, 404})
"""The statuses that may be one replica's fault: another key, another model, another program at its address."""

AttemptResult: TypeAlias = http.HttpResponse | Failed

WatchAttempt: TypeAlias = Callable[[str, Coroutine[Any, Any, http.HttpResponse]], Awaitable[http.HttpResponse]]
"""Awaits a request to the replica at a URL; it may abort the request if that replica's process has exited."""

IsFinalAnswer: TypeAlias = Callable[[http.HttpResponse], bool]


@dataclass(slots=True)
class Replica:
    """One server of the model, and its availability. Times are those of `time.monotonic`.

    Attributes:
        url: The base URL.
        pause: The current pause in seconds; 0 while the replica is up.
        retry_at: When the pause ends.
        is_probing: Whether a request after the pause is in progress; there is one at a time.
        rest_until: Until when the replica asked for no requests with `Retry-After`.
    """

    url: str
    pause: float = 0.0
    retry_at: float = 0.0
    is_probing: bool = False
    rest_until: float = 0.0

    @property
    def is_available(self) -> bool:
        """Whether the replica may receive a request before all others have failed."""
        is_up = not self.pause or (not self.is_probing and time.monotonic() >= self.retry_at)
        return is_up and not self.rest_seconds

    @property
    def rest_seconds(self) -> float:
        """The remaining seconds for which the replica asked for no requests."""
        return max(0.0, self.rest_until - time.monotonic())

    def build_url(self, path: str) -> str:
        """Return the URL of *path* below the base URL, or beside its `/v1` if *path* begins with a slash."""
        base = self.url.rstrip("/")
        return f"{base.removesuffix('/v1')}{path}" if path.startswith("/") else f"{base}/{path}"


@dataclass(frozen=True, slots=True)
class Call:
    """One request.

    Attributes:
        path: The path; see `Replica.build_url`.
        body: The JSON body.
        deadline: When to give up, as a time of the event loop's clock.
        is_final: Whether a response needs no retry regardless of its status.
    """

    path: str
    body: bytes
    deadline: float
    is_final: IsFinalAnswer


class ReplicaRouter:
    """Sends requests to the replicas of one model.

    Args:
        urls: The replicas' base URLs.
        key: The API key.
        headers: Further headers.
        seconds: The usual time limit of a request; a replica that had more than half of it counts as down if it does
            not answer.
        retry: How to retry when all replicas have failed.
        watch: Awaits each request, if given.
        largest: The maximum size of a response after decompression, in bytes.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: SecretStr | None = None,
        headers: Mapping[str, SecretStr] | None = None,
        seconds: float = 600.0,
        retry: http.Retry = http.DEFAULT_RETRY,
        watch: WatchAttempt | None = None,
        largest: int = http.MAX_ANSWER_BYTES,
    ) -> None:
        self._replicas = [Replica(url) for url in urls]
        self._key = key
        self._headers = headers or {}
        self._seconds = seconds
        self._retry = retry
        self._watch = watch
        self._max_answer_bytes = largest

    async def post(
        self, path: str, body: Item, *, sticky: str, deadline: float, final: IsFinalAnswer
    ) -> http.HttpResponse:
        """Post *body* to the conversation's replica, or to another one if that fails.

        The next replica follows a failed one immediately; after all of them comes a pause. If a call is cancelled while
        it retries, its `CancelledError` has a note that describes the last failed attempt.

        Args:
            path: The path; see `Replica.build_url`.
            body: The JSON body.
            sticky: The key of the conversation; see `get_sticky_key`.
            deadline: When to give up, as a time of the event loop's clock.
            final: Returns whether a response needs no retry regardless of its status.

        Returns:
            The response, with any status.

        Raises:
            Failed: No replica responded.
        """
        call, replicas = Call(path, http.encode_body(body), deadline, final), self._order_replicas(sticky)
        clock = asyncio.get_running_loop().time
        result: AttemptResult | None = None
        failures = 0
        try:
            while not _is_settled(result := await self._try_all(replicas, call), call):
                overloaded = isinstance(result, http.HttpResponse) and result.not_started
                if not overloaded and failures >= self._retry.times:
                    break
                wait = self._retry.get_wait_seconds(failures) + min(replica.rest_seconds for replica in replicas)
                if clock() + wait >= deadline:
                    break
                await asyncio.sleep(wait)
                # Waiting for an overloaded server is not a failed attempt.
                failures += not overloaded
        except asyncio.CancelledError as error:
            if result is not None:
                error.add_note(_describe_result(result))
            raise
        assert result is not None
        if isinstance(result, Failed):
            raise result
        return result

    def _order_replicas(self, sticky: str) -> list[Replica]:
        """Return the replicas in the conversation's order, which does not depend on their availability.

        This is rendezvous hashing: if a replica fails, only its own conversations move.
        """
        if len(self._replicas) == 1:
            return self._replicas
        return sorted(
            self._replicas, key=lambda each: blake2b(f"{each.url}\0{sticky}".encode(), digest_size=8).digest()
        )

    async def _try_all(self, replicas: Sequence[Replica], call: Call) -> AttemptResult:
        """Return the first settled result, else the last response, else the last failure.

        A result that may be one replica's fault has the lowest priority, and counts against that replica once another
        replica's result settles the call.
        """
        result: AttemptResult | None = None
        misrouted: AttemptResult | None = None
        suspects: list[tuple[Replica, str]] = []
        for replica in _iter_candidates(replicas):
            latest = await self._try_replica(replica, call)
            if reason := _find_misrouting(latest):
                misrouted = latest
                suspects.append((replica, reason))
                continue
            if isinstance(latest, http.HttpResponse) or not isinstance(result, http.HttpResponse):
                result = latest
            if _is_settled(result, call):
                for suspect, suspicion in suspects:
                    self._mark_down(suspect, suspicion)
                return result
        outcome = result or misrouted
        assert outcome is not None
        return outcome

    async def _try_replica(self, replica: Replica, call: Call) -> AttemptResult:
        seconds_left = call.deadline - asyncio.get_running_loop().time()
        is_probe = bool(replica.pause)
        replica.is_probing = replica.is_probing or is_probe
        try:
            request = http.post(
                replica.build_url(call.path),
                call.body,
                key=self._key,
                headers=self._headers,
                timeout=seconds_left,
                retry=http.NO_RETRY,
                max_answer_bytes=self._max_answer_bytes,
            )
            response = await (self._watch(replica.url, request) if self._watch else request)
        except Failed as error:
            if _find_misrouting(error):
                return error
            if not error.retryable:
                raise
            if error.kind != "model_timeout":
                self._mark_down(replica, str(error))
                return error
            # The last replica in a round may have had too little time to answer.
            if seconds_left > self._seconds / 2:
                self._mark_down(replica, str(error))
            raise http.build_timeout_error(http.get_host(replica.url), self._seconds) from error
        finally:
            # A request that began before the replica went down does not end the probe.
            replica.is_probing = replica.is_probing and not is_probe
        self._record_response(replica, response)
        return response

    def _record_response(self, replica: Replica, response: http.HttpResponse) -> None:
        if response.retry_after and http.is_retryable_status(response.status):
            replica.rest_until = max(replica.rest_until, time.monotonic() + response.retry_after)
        # An overloaded server is not down.
        if _find_misrouting(response) or response.not_started:
            return
        if response.status in UNAVAILABLE_STATUSES:
            self._mark_down(replica, f"{response.host} answered {response.status}")
            return
        if replica.pause and len(self._replicas) > 1:
            log.warning("%s answers again and gets its conversations back", http.get_host(replica.url))
        replica.pause = 0.0

    def _mark_down(self, replica: Replica, reason: str) -> None:
        now = time.monotonic()
        if replica.pause and now < replica.retry_at:
            # Another call has reported the same outage.
            return
        if not replica.pause and len(self._replicas) > 1:
            log.warning("%s; its conversations go to the model's other servers until it answers again", reason)
        replica.pause = min(MAX_PAUSE_SECONDS, replica.pause * 2) or FIRST_PAUSE_SECONDS
        replica.retry_at = now + replica.pause


def get_sticky_key(request: Item, episode: Episode | None) -> str:
    """Return a key that the requests of one conversation share, such as the episode's id or the opening messages."""
    return (episode.id if episode else "") or STICKY_KEY.get() or _get_opening_text(request)


def _iter_candidates(replicas: Sequence[Replica]) -> Iterator[Replica]:
    """Yield the available replicas; if there is none, the replicas that did not ask for a rest, or else all."""
    any_available = False
    for replica in replicas:
        if replica.is_available:
            any_available = True
            yield replica
    if not any_available:
        yield from [replica for replica in replicas if not replica.rest_seconds] or replicas


def _is_settled(result: AttemptResult, call: Call) -> bool:
    if isinstance(result, Failed):
        return not result.retryable
    return not http.is_retryable_status(result.status) or call.is_final(result)


def _describe_result(result: AttemptResult) -> str:
    return str(result) if isinstance(result, Failed) else f"{result.host} answered {result.status}"


def _find_misrouting(result: AttemptResult) -> str | None:
    """Return a description of *result* if it may be the fault of this replica and not of the request."""
    if isinstance(result, Failed):
        return str(result) if result.kind == "model_untrusted" else None
    if result.status in MISROUTED_STATUSES:
        return f"{result.host} answered {result.status}"
    # A full parse would be done twice, and costs more than the rare wrong guess.
    is_object = result.body.lstrip()[:1] == b"{" and result.body.rstrip()[-1:] == b"}"
    return f"{result.host} answered {result.status} without a JSON object" if result.ok and not is_object else None


def _get_opening_text(request: Item) -> str:
    """Return the text before the policy's first turn."""
    value = request.get("input")
    items = [{"role": "user", "content": value}] if isinstance(value, str) else value or []
    opening = takewhile(lambda item: not is_policy_item(item), items)
    lines = (f"{item.get('role')}: {extract_text(item.get('content'))}" for item in opening)
    return "\n".join([str(request.get("instructions") or ""), *lines])
