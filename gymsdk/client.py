"""The client of a whole topology: servers asked by name, their addresses looked up at the head."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Self

from pydantic import SecretStr

from gymsdk import credentials, http, jars
from gymsdk.addresses import near
from gymsdk.errors import Failed, suggestion
from gymsdk.http import Answer
from gymsdk.told import value_of

HEAD = "http://127.0.0.1:11000"
"""Where a head is where nobody says otherwise."""

AGAIN = frozenset({"/verify", "/aggregate_metrics", "/v1/responses", "/v1/chat/completions"})
"""POSTs that may be sent again: the second does nothing that the first has not."""

VERSION = "gymsdk_version"
"""The key under which the configuration of our own servers says which gymsdk they are of."""

SETTLING = 30.0
"""Seconds that a head is asked again in, at most, that may hear of more servers: it says itself until when."""

LOOKING = 0.25
"""Seconds between two questions."""

NO_SUCH = frozenset({404, 405})
"""The statuses of an endpoint that is not there."""

KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")


class Unknown(Failed):
    """A head knows no server of that name."""

    def __init__(self, message: str) -> None:
        super().__init__(message, kind="server_unreachable", stage="host", retryable=True)


class ServerClient:
    """Asks servers by their names, which the *head* knows the addresses of, ours or NeMo Gym's.

    An answer comes within *seconds*, or `Failed` is raised; what only this time has no answer is asked again, as
    *retry* says, unless that might do something twice. Every request carries the *token*: if none is given, the one in
    the file that GYMSDK_TOKEN_FILE names.
    """

    def __init__(
        self,
        head: str = HEAD,
        *,
        seconds: float = 600.0,
        retry: http.Retry = http.RETRY,
        token: SecretStr | str | None = None,
    ) -> None:
        self.head = head.rstrip("/")
        self.headers = credentials.carried(token)
        self._seconds = seconds
        self._retry = retry
        self._servers: dict[str, str] | None = None
        self._looking: dict[str, asyncio.Task[dict[str, str]]] = {}

    @classmethod
    def load_from_global_config(cls, head: str = HEAD) -> Self:
        """Give the client of the servers that the *head* knows."""
        return cls(head)

    async def post(
        self,
        server_name: str,
        url_path: str,
        *,
        json: object = None,
        cookies: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Give what the server answers to *json* posted at *url_path*; raises `Unknown` where none has the name."""
        body = {} if json is None else json
        again = url_path in AGAIN

        def ask(url: str) -> Awaitable[Answer]:
            sent = self._sent(url, headers, cookies)
            return http.post(
                url + url_path, body, headers=sent, timeout=self._seconds, retry=self._retry, once=not again
            )

        return await self._found(server_name, ask, again=again)

    async def get(
        self,
        server_name: str,
        url_path: str,
        *,
        cookies: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Give what the server has at *url_path*; raises `Unknown` where none has the name."""

        def ask(url: str) -> Awaitable[Answer]:
            sent = self._sent(url, headers, cookies)
            return http.get(url + url_path, headers=sent, timeout=self._seconds, retry=self._retry)

        return await self._found(server_name, ask, again=True)

    def build_headers_for(self, url: str) -> http.Headers:
        """Give what a request to *url* carries: the token not in the clear where the head is asked by TLS."""
        return {} if self.head.startswith("https:") and not url.startswith("https:") else self.headers

    def _sent(self, url: str, headers: Mapping[str, str] | None, cookies: Mapping[str, str] | None) -> http.Headers:
        return {**self.build_headers_for(url), **(headers or {}), **jars.header(cookies or {})}

    async def _found(self, server_name: str, ask: Callable[[str], Awaitable[Answer]], *, again: bool) -> Answer:
        """Give what is answered to *ask* at a server's address; where nobody is there, at the one it has moved to.

        What is not to be asked *again* is asked there only where it cannot have arrived before.
        """
        url = await self.url(server_name)
        try:
            return await ask(url)
        except Failed as error:
            if error.kind != "model_unreachable":
                raise
            self.forget(server_name, url)
            if not (again or isinstance(error, http.Unsent)) or (moved := await self.url(server_name)) == url:
                raise
        return await ask(moved)

    def forget(self, server_name: str, url: str) -> None:
        """Look a server up again before it is next asked: at *url* it was not there."""
        if self._servers is not None and self._servers.get(server_name) == url:
            self._servers = None

    async def url(self, server_name: str) -> str:
        """Give the base URL of a server, as the head told it last; raises `Unknown` where it knows none."""
        if self._servers is None or server_name not in self._servers:
            self._servers = await self._looked_up(server_name)
        if server_name in self._servers:
            return self._servers[server_name]
        known = ", ".join(self._servers) or "none"
        meant = suggestion(server_name, self._servers, f"its servers: {known}")
        raise Unknown(f"{http.host(self.head)} knows no server {server_name!r}{meant}")

    async def _looked_up(self, server_name: str) -> dict[str, str]:
        """Ask the head for its servers, once for all callers that look for the same one at the same time."""
        looking = self._looking.get(server_name)
        if looking is None:

            async def look() -> dict[str, str]:
                return dict(_servers(await self.wait_for_config(lambda config: server_name in dict(_servers(config)))))

            looking = self._looking[server_name] = asyncio.ensure_future(look())
            looking.add_done_callback(lambda _: self._looking.pop(server_name, None))
        # A caller that is cancelled must not cancel the others' lookup.
        return await asyncio.shield(looking)

    async def servers(self) -> dict[str, str]:
        """Give the base URL of every server that the head knows, by name."""
        return dict(_servers(await self.config()))

    async def wait_for_config(self, there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Give the configuration as soon as all that is wanted is *there*, or no more is to be expected.

        A head that has just begun does not know yet who was there before it.
        """
        clock = asyncio.get_running_loop().time
        until, settled = clock() + SETTLING, False
        while not there(found := await self.config()) and not settled and clock() < until:
            settled = await self._settled()
            if not settled:
                await asyncio.sleep(LOOKING)
        return found

    async def _settled(self) -> bool:
        """Whether the head has had the time to hear of all servers; one of NeMo Gym's says nothing of it."""
        answer = await self._told("/nodes")
        if answer.status in NO_SUCH:
            return True
        value = value_of(_checked(answer))
        return not (isinstance(value, dict) and value.get("settled") is False)

    async def config(self) -> dict[str, Any]:
        """Give the configuration the head tells: for each server, by its name, a block of three levels."""
        return _mapping(_checked(await self._told("/global_config_dict_yaml")))

    async def _told(self, path: str) -> Answer:
        """Give what the head answers at *path*; raises `Failed` where it answers nothing, or wants another token."""
        answer = await http.get(self.head + path, headers=self.headers, timeout=self._seconds, retry=self._retry)
        if answer.status == credentials.UNAUTHORIZED:
            raise credentials.refused(answer.host, had_token=bool(self.headers))
        return answer


def _checked(answer: Answer) -> Answer:
    """Give an *answer* of a head that is none of its refusals; raises `Failed`."""
    if not answer.ok:
        raise Failed(f"{answer.host} answered {answer.status}: is it a head?", kind="head_error", retryable=True)
    return answer


def _mapping(answer: Answer) -> dict[str, Any]:
    """Give the configuration in *answer*: YAML, mostly in a JSON string."""
    import yaml

    try:
        told = json.loads(answer.body)
    except ValueError:
        told = answer.text
    try:
        found = yaml.safe_load(told) if isinstance(told, str) else told
    except yaml.YAMLError:
        found = None
    if not isinstance(found, dict):
        raise Failed(f"{answer.host} has no configuration of servers: is it a head?", kind="head_error")
    return found


def _servers(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, block in config.items():
        for kind in KINDS:
            implementations = block.get(kind) if isinstance(block, dict) else None
            for server in implementations.values() if isinstance(implementations, dict) else ():
                if isinstance(server, dict) and server.get("host") and server.get("port"):
                    host = near(str(server["host"]))
                    scheme = "https" if server.get("scheme") == "https" else "http"
                    yield str(name), f"{scheme}://{f'[{host}]' if ':' in host else host}:{server['port']}"
