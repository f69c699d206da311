"""The replicas of one model: a conversation stays with one of them, and moves where that one is lost."""

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
from gymsdk.http import client
from gymsdk.responses import is_policy_item
from gymsdk.types import Episode, Item, extract_text

log = logging.getLogger("gymsdk")

STICKY_KEY: ContextVar[str | None] = ContextVar("gymsdk_sticky", default=None)
"""What the calls of one conversation have in common, where a server knows it of its clients."""

FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 1.0, 30.0
"""Seconds a lost replica is left alone: doubled each time it stays lost."""

UNAVAILABLE_STATUSES = frozenset({502, 503, 504})
"""The statuses of a server that is not there behind what answers."""

MISROUTED_STATUSES = frozenset({401, 403, 404})
"""The statuses that may be one server's own fault: another key, another model, another program at its address."""

AttemptResult: TypeAlias = client.HttpResponse | Failed
WatchAttempt: TypeAlias = Callable[[str, Coroutine[Any, Any, client.HttpResponse]], Awaitable[client.HttpResponse]]
"""Waits for what the replica at a URL answers; it may give up on one that is gone, and raise what ends the call."""

IsFinalAnswer: TypeAlias = Callable[[client.HttpResponse], bool]


@dataclass(slots=True)
class Replica:
    """The server at *url*; lost, it is left alone for a *pause*, until *back*, when one call is *trying* it again.

    Nobody asks it before *rested* who can wait or ask another: so it said itself.
    """

    url: str
    pause: float = 0.0
    retry_at: float = 0.0
    is_probing: bool = False
    rest_until: float = 0.0

    @property
    def is_available(self) -> bool:
        """Whether it may be asked before the others have been."""
        return not self.rest_seconds and (not self.pause or (not self.is_probing and time.monotonic() >= self.retry_at))

    @property
    def rest_seconds(self) -> float:
        """The seconds for which it asked to be left alone that are still to come."""
        return max(0.0, self.rest_until - time.monotonic())

    def build_url(self, path: str) -> str:
        """Give the address of *path* under the base URL, or beside its `/v1` where it begins with a slash."""
        base = self.url.rstrip("/")
        return f"{base.removesuffix('/v1')}{path}" if path.startswith("/") else f"{base}/{path}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call: what is posted at *path*, by when, and which answers to it are *final*, whatever their status."""

    path: str
    body: bytes
    deadline: float
    final: IsFinalAnswer


class ReplicaRouter:
    """The servers at *urls*, each of which serves the same model.

    A call has *seconds* in all, and its answer may have *largest* bytes.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: SecretStr | None = None,
        headers: Mapping[str, SecretStr] | None = None,
        seconds: float = 600.0,
        retry: client.Retry = client.DEFAULT_RETRY,
        watch: WatchAttempt | None = None,
        largest: int = client.MAX_ANSWER_BYTES,
    ) -> None:
        self._all = [Replica(url) for url in urls]
        self._key = key
        self._headers = headers or {}
        self._seconds = seconds
        self._retry = retry
        self._watch = watch
        self._largest = largest

    async def post(
        self, path: str, body: Item, *, sticky: str, deadline: float, final: IsFinalAnswer
    ) -> client.HttpResponse:
        """Give the answer to *body* at *path* of the replica that has the conversation *sticky*, or of another.

        One that fails is followed by the next at once, and all of them by a pause, until the *deadline*. Raises
        `Failed` where there is no answer at all. A call that is cancelled while it retries carries the last failed
        attempt as a note on its `CancelledError`.
        """
        call, order = Call(path, client.encode_body(body), deadline, final), self._ordered(sticky)
        clock = asyncio.get_running_loop().time
        found: AttemptResult | None = None
        number = 0
        try:
            while not _is_settled(found := await self._round(order, call), call):
                overloaded = isinstance(found, client.HttpResponse) and found.not_started
                if not overloaded and number >= self._retry.times:
                    break
                wait = self._retry.get_wait_seconds(number) + min(replica.rest_seconds for replica in order)
                if clock() + wait >= deadline:
                    break
                await asyncio.sleep(wait)
                # Waiting for an overloaded server is not a failed try.
                number += not overloaded
        except asyncio.CancelledError as error:
            if found is not None:
                error.add_note(_describe_result(found))
            raise
        assert found is not None
        if isinstance(found, Failed):
            raise found
        return found

    def _ordered(self, sticky: str) -> list[Replica]:
        """The replicas as the conversation prefers them: each its own order, which no other's absence changes."""
        if len(self._all) == 1:
            return self._all
        return sorted(self._all, key=lambda each: blake2b(f"{each.url}\0{sticky}".encode(), digest_size=8).digest())

    async def _round(self, order: Sequence[Replica], call: Call) -> AttemptResult:
        """The first answer that settles it, else the last answer there was, else the last failure.

        What may be a replica's own fault comes after all these, and is its fault once another's answer settles it.
        """
        found: AttemptResult | None = None
        stray: AttemptResult | None = None
        strays: list[tuple[Replica, str]] = []
        for replica in _iter_candidates(order):
            latest = await self._ask(replica, call)
            if why := _find_misrouting(latest):
                stray = latest
                strays.append((replica, why))
                continue
            found = (
                latest
                if isinstance(latest, client.HttpResponse) or not isinstance(found, client.HttpResponse)
                else found
            )
            if _is_settled(found, call):
                for other, told in strays:
                    self._strike(other, told)
                return found
        outcome = found or stray
        assert outcome is not None
        return outcome

    async def _ask(self, replica: Replica, call: Call) -> AttemptResult:
        clock = asyncio.get_running_loop().time
        left, trial = call.deadline - clock(), bool(replica.pause)
        replica.is_probing = replica.is_probing or trial
        try:
            asked = client.post(
                replica.build_url(call.path),
                call.body,
                key=self._key,
                headers=self._headers,
                timeout=left,
                retry=client.NO_RETRY,
                max_answer_bytes=self._largest,
            )
            answer = await (self._watch(replica.url, asked) if self._watch else asked)
        except Failed as error:
            if _find_misrouting(error):
                return error
            if not error.retryable:
                raise
            if error.kind != "model_timeout":
                self._strike(replica, str(error))
                return error
            # Whoever was asked last may have had no time to answer.
            if left > self._seconds / 2:
                self._strike(replica, str(error))
            raise client.build_timeout_error(client.get_host(replica.url), self._seconds) from error
        finally:
            # A call that began before the loss says nothing of who tries it now.
            replica.is_probing = replica.is_probing and not trial
        self._heard(replica, answer)
        return answer

    def _heard(self, replica: Replica, answer: client.HttpResponse) -> None:
        if answer.retry_after and client.is_retryable_status(answer.status):
            replica.rest_until = max(replica.rest_until, time.monotonic() + answer.retry_after)
        # An overloaded server is not lost.
        if _find_misrouting(answer) or answer.not_started:
            return
        if answer.status in UNAVAILABLE_STATUSES:
            self._strike(replica, f"{answer.host} answered {answer.status}")
            return
        if replica.pause and len(self._all) > 1:
            log.warning("%s answers again: its conversations are back", client.get_host(replica.url))
        replica.pause = 0.0

    def _strike(self, replica: Replica, why: str) -> None:
        now = time.monotonic()
        if replica.pause and now < replica.retry_at:
            # One loss, though many calls are hit by it.
            return
        if not replica.pause and len(self._all) > 1:
            log.warning("%s; its conversations go to the model's other servers until it answers again", why)
        replica.pause = min(MAX_PAUSE_SECONDS, replica.pause * 2) or FIRST_PAUSE_SECONDS
        replica.retry_at = now + replica.pause


def _iter_candidates(order: Sequence[Replica]) -> Iterator[Replica]:
    """Those that are open when it is their turn; where none is, all but those that rest, where not all do."""
    asked = False
    for replica in order:
        if replica.is_available:
            asked = True
            yield replica
    if not asked:
        yield from [replica for replica in order if not replica.rest_seconds] or order


def _is_settled(found: AttemptResult, call: Call) -> bool:
    if isinstance(found, Failed):
        return not found.retryable
    return not client.is_retryable_status(found.status) or call.final(found)


def _describe_result(found: AttemptResult) -> str:
    return str(found) if isinstance(found, Failed) else f"{found.host} answered {found.status}"


def _find_misrouting(found: AttemptResult) -> str | None:
    """Say what may be the fault of the one replica that was asked, not of the call."""
    if isinstance(found, Failed):
        return str(found) if found.kind == "model_untrusted" else None
    if found.status in MISROUTED_STATUSES:
        return f"{found.host} answered {found.status}"
    # To parse it twice would cost more than who reads it can lose.
    whole = found.body.lstrip()[:1] == b"{" and found.body.rstrip()[-1:] == b"}"
    return f"{found.host} answered {found.status} without a JSON object" if found.ok and not whole else None


def get_sticky_key(request: Item, episode: Episode | None) -> str:
    """Give what the calls of the conversation that *request* is part of have in common, and few others have."""
    return (episode.id if episode else "") or STICKY_KEY.get() or _get_opening_text(request)


def _get_opening_text(request: Item) -> str:
    """What was said before the policy's first turn."""
    given = request.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    first = takewhile(lambda item: not is_policy_item(item), items)
    said = (f"{item.get('role')}: {extract_text(item.get('content'))}" for item in first)
    return "\n".join([str(request.get("instructions") or ""), *said])
