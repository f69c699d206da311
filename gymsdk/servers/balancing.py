"""Spread: an environment behind several resources servers of one name, each episode at the least loaded of them."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from pydantic import SecretStr

from gymsdk.environment import Environment
from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.servers.aggregates import aggregate_rows
from gymsdk.servers.auth import cookie_name, parse_instance
from gymsdk.servers.instances import (
    LOOK_INTERVAL_SECONDS,
    RECHECK_SECONDS,
    RECONNECT_SECONDS,
    WATCH_SECONDS,
    InstanceDirectory,
)
from gymsdk.servers.remote import RemoteEnvironment
from gymsdk.servers.remote_episode import UNREACHABLE_KIND, InstanceTally, RemoteEpisode
from gymsdk.servers.reports import Instance
from gymsdk.servers.tool_calls import SessionConnection
from gymsdk.types import Action, Episode, Item, Row, Step, Task, Verdict

T = TypeVar("T")

DEFAULT_RETRY = client.Retry(times=2, first=0.25)
"""How often a call is tried again where nobody was reached: a session is at one instance alone."""

TOO_MANY_KIND = "too_many"
"""The kind of failure of an opening that an overloaded instance refuses."""

OVERLOAD_KINDS = frozenset({"server_error", TOO_MANY_KIND})
"""The kinds of failure of an opening at an instance that has no place for it, or is being stopped."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class LocalInstance:
    """The instance *id* in this process, of an *environment* that is open."""

    id: str
    environment: Environment


class LoadBalancer:
    """The environment *name*, each episode at the least loaded of its *instances*, where it stays.

    *own* is one of them, in this process: what is played there goes over no wire. An
    opening that fails at one instance goes on to the next. Where there is none, *coming* seconds are waited for one.
    """

    def __init__(
        self,
        name: str,
        instances: InstanceDirectory,
        *,
        own: LocalInstance | None = None,
        seconds: float = 600.0,
        retry: client.Retry = DEFAULT_RETRY,
        token: SecretStr | str | None = None,
        coming: float = RECONNECT_SECONDS,
        watch: float = WATCH_SECONDS,
    ) -> None:
        self.name = name
        self.instances = instances
        self._own = own
        self._playing = 0
        self._seconds = seconds
        self._retry = retry
        self._token = token
        self._coming = coming
        self._watch = watch
        self._tallies: defaultdict[str, InstanceTally] = defaultdict(InstanceTally)
        self._asked = 0

    def __repr__(self) -> str:
        return f"<Spread {self.name!r}>"

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open an episode of *row* at the least loaded instance; raises `BadRow` where it does not fit."""

        def opened(instance: Instance) -> Awaitable[Episode]:
            open_at = self._reset_local if self._is_local(instance) else self._remote_episode(instance).reset
            return open_at(row, seed=seed, id=id, repeat=repeat, deadline=deadline)

        return await self._ask_until_deadline(opened, deadline)

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply where the episode is."""
        return await episode.environment.step(episode, action)

    async def verify(self, episode: Episode) -> Verdict:
        """Give the verdict of the instance where the episode is; raises `EpisodeError`."""
        return await episode.environment.verify(episode)

    async def close(self, episode: Episode) -> None:
        """Close the episode where it is."""
        if self._own is not None and episode.environment is self._own.environment:
            self._playing -= 1
        await episode.environment.close(episode)

    async def open_connection(self, jar: Mapping[str, str] | None = None) -> SessionConnection:
        """Give a line to the session that the cookies in *jar* are for, at the instance that has it.

        Where no cookie says which that is, any instance will find it.
        """
        held = parse_instance((jar or {}).get(cookie_name("ResourcesServer", self.name), ""))
        found = [each for each in await self._known_instances() if each.url]
        at = [each for each in found if each.id == held] or sorted(found, key=self._sort_key)
        if not at:
            raise self._no_instance_error()
        return self._remote(at[0]).open_connection(jar)

    def auth_headers(self, base_url: str) -> client.Headers:
        """Give what requests to *base_url* carry: the token where that is one of the instances."""
        told = (self._remote(each).auth_headers(base_url) for each in self.instances.latest_by_name(self.name))
        return next(filter(None, told), {})

    async def aggregate(self, body: Row) -> Item:
        """Give the figures over the verified rows in *body*, of whichever instance answers; raises `Refused`."""
        if self._own is not None:
            return await aggregate_rows(self._own.environment, body)
        return await self._ask_until_deadline(lambda instance: self._remote(instance).aggregate(body), None)

    async def _reset_local(
        self, row: Row | Task, *, seed: int, id: str, repeat: int, deadline: float | None
    ) -> Episode:
        assert self._own is not None, "it is asked only where it is there"
        self._playing += 1
        try:
            return await self._own.environment.reset(row, seed=seed, id=id, repeat=repeat, deadline=deadline)
        except BaseException:
            self._playing -= 1
            raise

    async def _ask_until_deadline(self, ask: Callable[[Instance], Awaitable[T]], deadline: float | None) -> T:
        """Give what the first instance answers that can be asked, the least loaded first.

        Where all of them are overloaded, wait as long as they ask for and try again, until the *deadline*.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + self._seconds if deadline is None else deadline
        while True:
            try:
                return await self._ask_each_once(ask, deadline)
            except Failed as error:
                pause = client.get_overload_pause(error.retry_after)
                if error.kind != TOO_MANY_KIND or clock() + pause >= until:
                    raise
            await asyncio.sleep(pause)

    async def _ask_each_once(self, ask: Callable[[Instance], Awaitable[T]], deadline: float | None) -> T:
        """Ask each instance once, the least loaded first."""
        tried: dict[str, Failed] = {}
        while (instance := await self._next_instance(tried, deadline)) is not None:
            self._asked += 1
            self._tallies[instance.id].latest = self._asked
            try:
                answer = await ask(instance)
            except Failed as error:
                if not error.retryable or error.kind not in {UNREACHABLE_KIND, *OVERLOAD_KINDS}:
                    raise
                self._record_failure(instance, error)
                tried[instance.id] = error
            else:
                self._tallies[instance.id].resume()
                return answer
        overloaded = (error for error in tried.values() if error.kind == TOO_MANY_KIND)
        # An overloaded instance is alive: its callers wait for it, even if another instance is gone.
        raise next(overloaded, None) or next(reversed(tried.values()), None) or self._no_instance_error()

    async def _next_instance(self, tried: Mapping[str, Failed], deadline: float | None) -> Instance | None:
        loop = asyncio.get_running_loop()
        until = self._wait_deadline(deadline)
        while True:
            there = [each for each in await self._available_instances() if each.id not in tried]
            if there:
                return min(there, key=self._sort_key)
            if tried or loop.time() >= until:
                return None
            await asyncio.sleep(LOOK_INTERVAL_SECONDS)
            await self.instances.renew()
            if any(each.draining for each in self.instances.latest_by_name(self.name)):
                # One that is about to end may be about to be started anew.
                until = self._wait_deadline(deadline)

    def _wait_deadline(self, deadline: float | None) -> float:
        return min(asyncio.get_running_loop().time() + self._coming, deadline or float("inf"))

    async def _available_instances(self) -> list[Instance]:
        found = [each for each in await self._known_instances() if not each.draining]
        if self._own is not None and not any(map(self._is_local, found)):
            mine = Instance(id=self._own.id, name=self.name, kind="resources_servers", implementation=self.name, url="")
            found = [mine, *found]
        for gone in self._tallies.keys() - {each.id for each in found}:
            del self._tallies[gone]
        return found

    async def _known_instances(self) -> list[Instance]:
        return await self.instances.find_by_name(self.name, "resources_servers")

    def _sort_key(self, instance: Instance) -> tuple[bool, bool, int, int]:
        tally = self._tallies[instance.id]
        if self._is_local(instance):
            # What is played in this process is no session that anybody tells of.
            return False, False, instance.load.sessions + self._playing, tally.latest
        doubtful = instance.status not in {None, "success"}
        load = instance.load.total + tally.change_since(self.instances.at - instance.age)
        return tally.is_suspended, doubtful, load, tally.latest

    def _record_failure(self, instance: Instance, error: Failed) -> None:
        if error.kind == UNREACHABLE_KIND and self._tallies[instance.id].suspend():
            log.warning("%s: %s; new episodes go to other instances until it answers again", self.name, error)

    def _is_local(self, instance: Instance) -> bool:
        return self._own is not None and instance.id == self._own.id

    def _remote_episode(self, instance: Instance) -> RemoteEpisode:
        tally = self._tallies[instance.id]
        return RemoteEpisode(
            instance, self._remote(instance), self.instances, tally, retry=self._retry, watch=self._watch
        )

    def _remote(self, instance: Instance) -> RemoteEnvironment:
        return RemoteEnvironment(
            instance.url, self.name, seconds=self._seconds, retry=client.NO_RETRY, token=self._token
        )

    def _no_instance_error(self) -> Failed:
        start = f"start one with `gymsdk serve {self.name} --role resources --head URL`"
        message = f"no resources server {self.name!r} is registered at the head; {start}"
        return Failed(message, kind=UNREACHABLE_KIND, stage="reset", retryable=True, retry_after=RECHECK_SECONDS)
