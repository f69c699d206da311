"""The client of a whole topology: servers asked by name, their addresses looked up at the head."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

from pydantic import SecretStr

from gymsdk import credentials
from gymsdk.errors import EpisodeError, Failed, Unscorable, format_suggestion
from gymsdk.http import client
from gymsdk.http.client import MAX_EXCERPT_CHARS, HttpResponse
from gymsdk.http.tls import get_reachable_host
from gymsdk.jsonl import is_finite_number, parse_json
from gymsdk.types import ROLLOUT_FIELDS, UNMASKED_FIELDS, Item, Row

NON_VERDICT_FIELDS = ROLLOUT_FIELDS | UNMASKED_FIELDS.keys() | {"reward", "components", "task_source", "skills_ref"}
"""What a judged row holds beside its own fields and the verdict's."""

STAMP_PREFIXES = ("_ng_", "ng_")
"""What the names begin with of what NeMo Gym's collector and its captures write."""


@dataclass(frozen=True, slots=True)
class RemoteVerdict:
    """A reward, its parts, and the verdict's own fields as plain JSON."""

    reward: float
    components: dict[str, float]
    fields: Item


def parse_object(answer: HttpResponse, stage: str) -> Item:
    """Give the object that *answer* holds; raises `Failed` where there is none."""
    value = parse_value(answer)
    if isinstance(value, dict):
        return value
    raise build_bad_answer_error(
        f"{answer.host} answered {answer.status} with no JSON object: {answer.text[:MAX_EXCERPT_CHARS]!r}", stage
    )


def parse_value(answer: HttpResponse) -> object:
    """Give the JSON value that *answer* holds, `None` where there is none."""
    try:
        return parse_json(answer.body)
    except (ValueError, RecursionError):
        return None


def parse_failure(answer: HttpResponse) -> EpisodeError | None:
    """Give what *answer* says is broken beneath the environment, `None` where it is the environment's own answer."""
    value = None if answer.ok else parse_value(answer)
    said = value if isinstance(value, dict) else {}
    kind, where, retryable = said.get("kind"), said.get("stage"), said.get("retryable")
    if not (isinstance(kind, str) and isinstance(where, str)):
        return None
    into = Unscorable if said.get("outcome") == "unscorable" else Failed
    return into(
        str(said.get("detail")),
        kind=kind,
        stage=where,
        retryable=retryable if isinstance(retryable, bool) else answer.status >= 500,  # noqa: PLR2004 - its own errors
        retry_after=answer.retry_after,
    )


def build_failure(answer: HttpResponse, stage: str) -> EpisodeError:
    """Give the failure that an *answer* which is no success means at *stage*."""
    found = parse_failure(answer)
    if found is not None:
        return found
    message = f"{answer.host} answered {answer.status}: {answer.text[:MAX_EXCERPT_CHARS]}"
    again = client.is_retryable_status(answer.status)
    return Failed(message, kind="server_error", stage=stage, retryable=again, retry_after=answer.retry_after)


def is_gymsdk_result(body: Row) -> bool:
    """Whether *body* was judged by gymsdk, and does not just carry on what was sent under that name."""
    ours = body.get("gymsdk")
    return isinstance(ours, dict) and isinstance(ours.get("verdict"), list) and "outcome" in ours


def parse_verdict(body: Row, row: Row) -> RemoteVerdict:
    """Give what *body* judges of *row*; raises `Unscorable` where it says itself that its reward is none."""
    if (masked := _parse_masked_reward(body)) is not None:
        raise masked
    reward: object = body.get("reward")
    parts = body.get("reward_components") or {}
    if not _is_number(reward):
        raise build_bad_answer_error(f"the server judged without a reward: {str(reward)[:MAX_EXCERPT_CHARS]}", "verify")
    if not isinstance(parts, dict) or not all(map(_is_number, parts.values())):
        raise build_bad_answer_error(
            f"the server's `reward_components` are no numbers by name: {str(parts)[:MAX_EXCERPT_CHARS]}", "verify"
        )
    return RemoteVerdict(reward=float(reward), components=parts, fields=_get_verdict_fields(body, row))


def build_bad_answer_error(message: str, stage: str) -> Failed:
    """Give the failure of an answer that cannot be read."""
    return Failed(message, kind="bad_answer", stage=stage)


def _parse_masked_reward(body: Row) -> Unscorable | None:
    """Give why the reward in *body* does not count, `None` where it does."""
    # Ours has a verdict only where its reward counts; a field of that name is then the environment's own.
    if is_gymsdk_result(body) and body["gymsdk"]["outcome"] == "scored":
        return None
    if not (body.get("mask_sample") is True or body.get("_ng_failure_class") or body.get("verification_skipped")):
        return None
    skipped = "verification_skipped" if body.get("verification_skipped") else "judge_failed"
    kind = str(body.get("failure_kind") or body.get("_ng_failure_class") or skipped)
    told = (body.get(f"_ng_failure_{word}") for word in ("judge_error", "message"))
    why = body.get("failure_reason") or next(filter(None, told), f"the server gives no reward: {kind}")
    again = body.get("_ng_failure_terminal") is not True
    return Unscorable(str(why), kind=kind, stage="verify", retryable=again)


def _get_verdict_fields(body: Row, row: Row) -> Item:
    """Give the verdict's own fields: those *body* names as that, or else what neither the row has so nor a stamp is."""
    if is_gymsdk_result(body):
        return {name: body[name] for name in body["gymsdk"]["verdict"] if name in body}
    told = (
        (name, each)
        for name, each in body.items()
        if name not in NON_VERDICT_FIELDS and not name.startswith(STAMP_PREFIXES)
    )
    return {name: each for name, each in told if name not in row or row[name] != each}


def _is_number(value: object) -> TypeGuard[float]:
    return is_finite_number(value)


DEFAULT_HEAD_URL = "http://127.0.0.1:11000"
"""Where a head is where nobody says otherwise."""

RETRYABLE_PATHS = frozenset({"/verify", "/aggregate_metrics", "/v1/responses", "/v1/chat/completions"})
"""POSTs that may be sent again: the second does nothing that the first has not."""

VERSION_KEY = "gymsdk_version"
"""The key under which the configuration of our own servers says which gymsdk they are of."""

SETTLE_SECONDS = 30.0
"""Seconds that a head is asked again in, at most, that may hear of more servers: it says itself until when."""

POLL_SECONDS = 0.25
"""Seconds between two questions."""

MISSING_STATUSES = frozenset({404, 405})
"""The statuses of an endpoint that is not there."""

SERVER_KINDS = ("resources_servers", "responses_api_agents", "responses_api_models", "environment_servers")


class UnknownServer(Failed):
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
        head: str = DEFAULT_HEAD_URL,
        *,
        seconds: float = 600.0,
        retry: client.Retry = client.DEFAULT_RETRY,
        token: SecretStr | str | None = None,
    ) -> None:
        self.head = head.rstrip("/")
        self.headers = credentials.resolve_auth_headers(token)
        self._seconds = seconds
        self._retry = retry
        self._servers: dict[str, str] | None = None
        self._looking: dict[str, asyncio.Task[dict[str, str]]] = {}

    @classmethod
    def load_from_global_config(cls, head: str = DEFAULT_HEAD_URL) -> Self:
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
    ) -> HttpResponse:
        """Give what the server answers to *json* posted at *url_path*; raises `Unknown` where none has the name."""
        body = {} if json is None else json
        again = url_path in RETRYABLE_PATHS

        def ask(url: str) -> Awaitable[HttpResponse]:
            sent = self._sent(url, headers, cookies)
            return client.post(
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
    ) -> HttpResponse:
        """Give what the server has at *url_path*; raises `Unknown` where none has the name."""

        def ask(url: str) -> Awaitable[HttpResponse]:
            sent = self._sent(url, headers, cookies)
            return client.get(url + url_path, headers=sent, timeout=self._seconds, retry=self._retry)

        return await self._found(server_name, ask, again=True)

    def build_headers_for(self, url: str) -> client.Headers:
        """Give what a request to *url* carries: the token not in the clear where the head is asked by TLS."""
        return {} if self.head.startswith("https:") and not url.startswith("https:") else self.headers

    def _sent(self, url: str, headers: Mapping[str, str] | None, cookies: Mapping[str, str] | None) -> client.Headers:
        return {**self.build_headers_for(url), **(headers or {}), **client.build_cookie_header(cookies or {})}

    async def _found(
        self, server_name: str, ask: Callable[[str], Awaitable[HttpResponse]], *, again: bool
    ) -> HttpResponse:
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
            if not (again or isinstance(error, client.NotSent)) or (moved := await self.url(server_name)) == url:
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
        meant = format_suggestion(server_name, self._servers, f"its servers: {known}")
        raise UnknownServer(f"{client.get_host(self.head)} knows no server {server_name!r}{meant}")

    async def _looked_up(self, server_name: str) -> dict[str, str]:
        """Ask the head for its servers, once for all callers that look for the same one at the same time."""
        looking = self._looking.get(server_name)
        if looking is None:

            async def look() -> dict[str, str]:
                return dict(
                    _iter_server_urls(
                        await self.wait_for_config(lambda config: server_name in dict(_iter_server_urls(config)))
                    )
                )

            looking = self._looking[server_name] = asyncio.ensure_future(look())
            looking.add_done_callback(lambda _: self._looking.pop(server_name, None))
        # A caller that is cancelled must not cancel the others' lookup.
        return await asyncio.shield(looking)

    async def servers(self) -> dict[str, str]:
        """Give the base URL of every server that the head knows, by name."""
        return dict(_iter_server_urls(await self.config()))

    async def wait_for_config(self, there: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Give the configuration as soon as all that is wanted is *there*, or no more is to be expected.

        A head that has just begun does not know yet who was there before it.
        """
        clock = asyncio.get_running_loop().time
        until, settled = clock() + SETTLE_SECONDS, False
        while not there(found := await self.config()) and not settled and clock() < until:
            settled = await self._settled()
            if not settled:
                await asyncio.sleep(POLL_SECONDS)
        return found

    async def _settled(self) -> bool:
        """Whether the head has had the time to hear of all servers; one of NeMo Gym's says nothing of it."""
        answer = await self._told("/nodes")
        if answer.status in MISSING_STATUSES:
            return True
        value = parse_value(_check_head_answer(answer))
        return not (isinstance(value, dict) and value.get("settled") is False)

    async def config(self) -> dict[str, Any]:
        """Give the configuration the head tells: for each server, by its name, a block of three levels."""
        return _parse_config(_check_head_answer(await self._told("/global_config_dict_yaml")))

    async def _told(self, path: str) -> HttpResponse:
        """Give what the head answers at *path*; raises `Failed` where it answers nothing, or wants another token."""
        answer = await client.get(self.head + path, headers=self.headers, timeout=self._seconds, retry=self._retry)
        if answer.status == credentials.UNAUTHORIZED:
            raise credentials.build_unauthorized_error(answer.host, had_token=bool(self.headers))
        return answer


def _check_head_answer(answer: HttpResponse) -> HttpResponse:
    """Give an *answer* of a head that is none of its refusals; raises `Failed`."""
    if not answer.ok:
        raise Failed(f"{answer.host} answered {answer.status}: is it a head?", kind="head_error", retryable=True)
    return answer


def _parse_config(answer: HttpResponse) -> dict[str, Any]:
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


def _iter_server_urls(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, block in config.items():
        for kind in SERVER_KINDS:
            implementations = block.get(kind) if isinstance(block, dict) else None
            for server in implementations.values() if isinstance(implementations, dict) else ():
                if isinstance(server, dict) and server.get("host") and server.get("port"):
                    host = get_reachable_host(str(server["host"]))
                    scheme = "https" if server.get("scheme") == "https" else "http"
                    yield str(name), f"{scheme}://{f'[{host}]' if ':' in host else host}:{server['port']}"
