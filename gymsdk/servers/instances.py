"""Instances: the servers of one name, as somebody sees them who asks the head where they are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from gymsdk import credentials
from gymsdk.errors import EpisodeError, Failed
from gymsdk.http import client
from gymsdk.observability.health import Status
from gymsdk.servers.reports import HeadSnapshot, Instance
from gymsdk.servers.service import Kind, Service
from gymsdk.types import Item

ROUTES_KEY = "environment_server_routes"
"""The key under which the configuration says whom a task of which environment is sent to."""


def choose_services(
    services: Iterable[Service], health: Mapping[str, Status | None], *, draining: Container[str] = ()
) -> dict[str, Service]:
    """Give one of *services* for each name: the oldest of those that answer, one of *draining* only if need be."""
    best: dict[str, Service] = {}

    def order(one: Service) -> tuple[bool, bool, float, str]:
        return health.get(one.id) not in {"success", None}, one.id in draining, one.started, one.id

    for each in sorted(services, key=order):
        best.setdefault(each.name, each)
    return best


def build_shared_config(services: Iterable[Service]) -> Item:
    """Give what the configuration says of *services* beside their blocks: where tasks are sent, what the model is."""
    said: dict[str, Any] = {}
    for each in services:
        its = each.fields.get("resources_server")
        if each.kind == "environment_servers" and isinstance(its, dict) and isinstance(its.get("name"), str):
            said.setdefault(ROUTES_KEY, {})[its["name"]] = each.name
        if each.kind == "responses_api_models" and isinstance(each.fields.get("model"), str):
            said.setdefault("policy_model_name", each.fields["model"])
    return said


T = TypeVar("T")

WATCH_SECONDS = 1.0
"""Seconds between two looks whether the instance that is waited for is still there."""

RECONNECT_SECONDS = 5.0
"""Seconds that a call waits for an instance where there is none."""

LOOK_INTERVAL_SECONDS = 0.25
"""Seconds between two looks for one meanwhile."""

RECHECK_SECONDS = 5.0
"""Seconds after which it is worth asking again where there is none."""

PROBE_SECONDS = 2.0
"""Seconds in which an instance that the head does not know any more has to say that it is there."""

MAX_MISSES = 3
"""How many times in a row it may be silent before it is gone: one silence may be an overload, here or there."""

UNAUTHORIZED = 401
"""The status of a server that is there, and wants a token to say more."""


class InstanceGone(Failed):
    """Nobody is there any more who could answer."""


async def wait_while_alive(
    asked: Coroutine[Any, Any, T], url: str, known: Callable[[], Awaitable[bool]], *, watch: float = WATCH_SECONDS
) -> T:
    """Give what is answered to what was *asked* at *url*, looked at each *watch* seconds; raises `Gone`.

    Whom the head has *known* no more, and who does not say by itself that it is there, is waited for no longer: a
    machine that lost its power says nothing, and its connections last as long as an answer may take. A server that
    refuses connections is gone at once, a silent one only after several misses.
    """
    asking, misses = asyncio.ensure_future(asked), 0
    try:
        while not (await asyncio.wait({asking}, timeout=watch))[0]:
            misses = 0 if await known() else misses + await _count_miss(url)
            if misses >= MAX_MISSES and not asking.done():
                sentence = f"{client.get_host(url)} is gone: neither the head knows it any more, nor does it answer"
                raise InstanceGone(sentence, kind="server_unreachable")
        return asking.result()
    finally:
        asking.cancel()


async def _count_miss(url: str) -> int:
    """Give how much the silence of what is at *url* counts: it may have left the head, and end what it has."""
    try:
        return 0 if await is_alive(url) else MAX_MISSES
    except client.NotSent:
        return MAX_MISSES
    except Failed:
        return 1


async def is_alive(url: str) -> bool:
    """Whether what is at *url* answers as a server of ours does; raises `Failed` where it does not answer in time."""
    answer = await client.get(url.rstrip("/") + "/livez", timeout=PROBE_SECONDS, retry=client.NO_RETRY)
    return answer.ok or answer.status == UNAUTHORIZED


NodesFetcher: TypeAlias = Callable[[], Awaitable[HeadSnapshot]]
"""Asks a head for all it knows."""

REFRESH_SECONDS = 1.0
"""Seconds for which what the head said is believed."""

SLOW_REFRESH_SECONDS = 5.0
"""How many times as long it is believed of one that is known: each server asks where it hands a request on."""

STALE_SECONDS = 10.0
"""Seconds after which it is not used until the head has been asked again, if that answers."""

HEAD_SECONDS = 2.0
"""Seconds the head may take to answer."""

MIN_REFRESH_SECONDS = 0.1
"""Seconds between two questions for an id that nobody knows: anybody can make one up."""

STARTUP_SECONDS = 1.0
"""Seconds in which an instance is told of that listens by now."""

MAX_REMEMBERED = 1000
"""Instances that are remembered of those that are gone, and ids that nobody has."""

UNKNOWN_SECONDS = 5.0
"""Seconds for which an id that nobody has is not looked for again."""

SILENT_SECONDS = 1.0
"""Seconds for which an instance is not asked again that did not answer: it may have been busy."""

log = logging.getLogger("gymsdk")


def auth_headers() -> client.Headers:
    """Give what our own requests carry: this process's token, where it has one."""
    return credentials.resolve_auth_headers(None)


def nodes_fetcher(
    head_url: str, *, headers: Callable[[], client.Headers] = auth_headers, seconds: float = HEAD_SECONDS
) -> Callable[[], Awaitable[HeadSnapshot]]:
    """Give what asks the head at *head_url* for all it knows, within *seconds*."""

    async def look() -> HeadSnapshot:
        answer = await client.get(
            head_url.rstrip("/") + "/nodes", headers=headers(), timeout=seconds, retry=client.NO_RETRY
        )
        return HeadSnapshot.model_validate(answer.json())

    return look


class InstanceDirectory:
    """Every instance of every server, by what *look* tells, which is asked after *fresh* seconds at the soonest.

    What was known lasts for as long as the head does not answer.
    """

    def __init__(self, look: NodesFetcher, *, fresh: float = REFRESH_SECONDS, patience: float = HEAD_SECONDS) -> None:
        self._look = look
        self._fresh = fresh
        self._patience = patience
        self._known: dict[str, Instance] = {}
        self._before: OrderedDict[str, Instance] = OrderedDict()
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._answered: dict[str, float] = {}
        self._asking: dict[str, asyncio.Task[bool]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._failing = False
        self._asked = float("-inf")
        self.at = float("-inf")

    async def find_by_name(self, name: str, kind: Kind) -> list[Instance]:
        """Give the instances of the server *name*, as they were *at* a time of the monotonic clock."""
        await self._refresh()
        return [each for each in self.latest_by_name(name) if each.kind == kind]

    def latest_by_name(self, name: str) -> list[Instance]:
        """Give the instances of the server *name* that were known when the head was asked last."""
        return [each for each in self._known.values() if each.name == name]

    async def is_known(self, id: str) -> bool:
        """Whether the instance *id* is there."""
        await self._refresh()
        return id in self._known

    async def find_url(self, id: str, *, name: str, kind: Kind) -> str | None:
        """Give where the instance *id* of a server is, `None` where it has none: the head is asked before that is said.

        One that the head knows no more is asked itself whether it is there: the head may have lost sight of it alone.
        Another may have been asked for before it was told of.
        """
        found = await self._find(id)
        # The id comes from whoever asks: with that of another server, it would be sent what is not for it.
        if found is None or (found.name, found.kind) != (name, kind):
            return None
        return found.url if id in self._known or await self._still_answers(found) else None

    async def _find(self, id: str) -> Instance | None:
        began = time.monotonic()
        # One that is known may be gone by now: nobody else may look.
        await self._refresh(fresh=self._fresh * (SLOW_REFRESH_SECONDS if id in self._known else 1))
        while id not in self._known:
            if began < self._unknown.get(id, 0.0):
                return None
            # One that was there says by itself whether it is: the head is waited for only where nobody else knows.
            if id in self._before:
                return self._before[id]
            await self._refresh(fresh=MIN_REFRESH_SECONDS, wait=True)
            if id in self._known:
                break
            if time.monotonic() >= began + STARTUP_SECONDS:
                self._record_miss(id, UNKNOWN_SECONDS)
                return None
            await asyncio.sleep(MIN_REFRESH_SECONDS)
        return self._known[id]

    async def _still_answers(self, before: Instance) -> bool:
        """Whether the instance that was there *before* still is, by its own word, and no other is in its place."""
        if any(each.url == before.url for each in self._known.values()):
            self._record_miss(before.id, UNKNOWN_SECONDS)
            return False
        if time.monotonic() < self._answered.get(before.id, float("-inf")):
            return True
        if (asking := self._asking.get(before.id)) is None:
            asking = self._asking[before.id] = asyncio.ensure_future(self._is_alive(before))
        # Whoever hangs up has not asked for the others that wait for the same answer.
        return await asyncio.shield(asking)

    async def _is_alive(self, before: Instance) -> bool:
        silent = SILENT_SECONDS
        try:
            if there := await is_alive(before.url):
                self._answered[before.id] = time.monotonic() + self._fresh
                return there
        except client.NotSent:
            silent = UNKNOWN_SECONDS
        except Failed as error:
            log.info("%s, which the head does not know any more, is silent: %s", before.name, error)
        finally:
            del self._asking[before.id]
        self._record_miss(before.id, silent)
        return False

    def _record_miss(self, id: str, seconds: float) -> None:
        self._unknown[id] = time.monotonic() + seconds
        self._answered.pop(id, None)
        while len(self._unknown) > MAX_REMEMBERED:
            self._unknown.popitem(last=False)

    async def renew(self) -> None:
        """Ask the head again, and wait for its answer."""
        await self._refresh(fresh=MIN_REFRESH_SECONDS, wait=True)

    async def _refresh(self, *, fresh: float | None = None, wait: bool = False) -> None:
        """Ask the head where that was long ago; its answer is waited for only where nothing else will do."""
        now = time.monotonic()
        if self._looking is None and now - self._asked >= (self._fresh if fresh is None else fresh):
            self._asked = now
            self._looking = asyncio.ensure_future(self._fetch())
        if self._looking is not None and (wait or (now - self.at > STALE_SECONDS and not self._failing)):
            await asyncio.wait({self._looking}, timeout=self._patience)

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(self._patience):
                nodes = await self._look()
        except (EpisodeError, ValidationError, TimeoutError) as error:
            if not self._failing:
                log.warning("the head does not say where the servers are: %s", str(error) or "it takes too long")
            self._failing = True
        else:
            # A head that has just begun does not know yet whoever was there before it.
            before = {} if nodes.settled else self._known
            self._update(before | {each.id: each for each in nodes.instances})
            self.at, self._failing = time.monotonic(), False
        finally:
            self._looking = None

    def _update(self, known: dict[str, Instance]) -> None:
        self._before.update((each.id, each) for each in self._known.values() if each.id not in known)
        for back in self._before.keys() & known.keys():
            del self._before[back]
        while len(self._before) > MAX_REMEMBERED:
            self._before.popitem(last=False)
        self._answered = {one: until for one, until in self._answered.items() if one in self._before}
        self._known = known
