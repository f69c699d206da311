"""A model behind one or more model servers that are found through the head."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from pydantic import SecretStr

from gymsdk.client import parse_value
from gymsdk.config.model import POLICY_SERVER
from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.http.client import HttpResponse
from gymsdk.router import ReplicaRouter, get_sticky_key
from gymsdk.servers.instances import (
    LOOK_INTERVAL_SECONDS,
    RECHECK_SECONDS,
    RECONNECT_SECONDS,
    WATCH_SECONDS,
    InstanceDirectory,
    InstanceGone,
    auth_headers,
    wait_while_alive,
)
from gymsdk.servers.reports import Instance
from gymsdk.servers.routing import ID_PATTERN
from gymsdk.servers.service import Kind
from gymsdk.types import Episode, Item

MODEL_SERVER_KIND: Kind = "responses_api_models"

FAILURE_PATTERN = re.compile(r"model_[a-z_]{1,40}|no_episode")
"""Pattern of the failure kinds that gymsdk's model servers return."""


class RemoteModel:
    """The model behind the model servers of one name; the calls of an episode go to the same server.

    Args:
        name: The server's name.
        instances: Finds the instances.
        seconds: The timeout of a call, including retries.
        retry: Retries of failed calls.
        headers: Returns the headers of each request.
        wait_seconds: Seconds to wait for an instance if there is none.
        watch: Seconds between two checks that an instance is alive.
    """

    def __init__(
        self,
        name: str,
        instances: InstanceDirectory,
        *,
        seconds: float = 600.0,
        retry: client.Retry = client.DEFAULT_RETRY,
        headers: Callable[[], client.Headers] = auth_headers,
        wait_seconds: float = RECONNECT_SECONDS,
        watch: float = WATCH_SECONDS,
    ) -> None:
        self.name = name
        self._instances = instances
        self._seconds = seconds
        self._retry = retry
        self._headers = headers
        self._wait_seconds = wait_seconds
        self._watch = watch
        self._replicas: tuple[tuple[Sequence[str], client.Headers], ReplicaRouter] | None = None

    def __repr__(self) -> str:
        return f"<RemoteModel {self.name!r}>"

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Return the model's response.

        Raises:
            Failed: No server answered.
        """
        deadline = asyncio.get_running_loop().time() + self._seconds
        answer = await self._request_replica(request, episode, deadline)
        if not answer.ok:
            raise _parse_failure(answer)
        response: Item = await answer.json_async()
        return response

    async def _request_replica(self, request: Item, episode: Episode | None, deadline: float) -> HttpResponse:
        path, affinity = _build_path(episode), get_sticky_key(request, episode)
        while True:
            replicas = self._client_for(await self._replica_urls(episode))
            try:
                return await replicas.post(path, request, sticky=affinity, deadline=deadline, final=_is_final_answer)
            except InstanceGone as gone:
                # The head no longer lists the instance, so the next attempt uses another one.
                if asyncio.get_running_loop().time() >= deadline:
                    raise Failed(str(gone), kind="model_unreachable", retryable=True) from None

    async def _while_alive(self, url: str, exchange: Coroutine[Any, Any, HttpResponse]) -> HttpResponse:
        async def known() -> bool:
            return any(each.url == url for each in await self._instances.find_by_name(self.name, MODEL_SERVER_KIND))

        return await wait_while_alive(exchange, url, known, watch=self._watch)

    async def _replica_urls(self, episode: Episode | None) -> list[str]:
        loop = asyncio.get_running_loop()
        until = loop.time() + self._wait_seconds
        while not (available := await self._available_instances()):
            if loop.time() >= until:
                raise self._no_instance_error(episode)
            await asyncio.sleep(LOOK_INTERVAL_SECONDS)
            await self._instances.renew()
        healthy = [each for each in available if each.status in {None, "success"}]
        return sorted(each.url for each in healthy or available)

    async def _available_instances(self) -> list[Instance]:
        return [each for each in await self._instances.find_by_name(self.name, MODEL_SERVER_KIND) if not each.draining]

    def _client_for(self, urls: Sequence[str]) -> ReplicaRouter:
        """Return the client for these URLs; an unchanged client keeps its knowledge of failed replicas."""
        key = (urls, dict(self._headers()))
        if self._replicas is None or self._replicas[0] != key:
            headers = {name: SecretStr(_reveal(value)) for name, value in key[1].items()}
            client = ReplicaRouter(
                urls, headers=headers, seconds=self._seconds, retry=self._retry, watch=self._while_alive
            )
            self._replicas = (key, client)
        return self._replicas[1]

    def _no_instance_error(self, episode: Episode | None) -> Failed:
        # Scripted models need the environment's name.
        environment = episode.environment.name if episode else "ENVIRONMENT"
        options = (
            f"{environment} --role model --model NAME" if self.name == POLICY_SERVER else "--config FILE --role model"
        )
        start = f"start one with `gymsdk serve {options} --head URL`"
        message = f"no model server {self.name!r} is registered at the head; {start}"
        return Failed(message, kind="model_unreachable", retryable=True, retry_after=RECHECK_SECONDS)


def _reveal(value: str | SecretStr) -> str:
    return value.get_secret_value() if isinstance(value, SecretStr) else value


def _build_path(episode: Episode | None) -> str:
    """Return the request path, with the rollout's id as a prefix for the server's log and capture."""
    has_id = episode is not None and re.fullmatch(ID_PATTERN, episode.id)
    return f"/ng-rollout/{episode.id}/v1/responses" if has_id and episode else "/v1/responses"


def _is_final_answer(answer: HttpResponse) -> bool:
    return answer.headers.get("x-should-retry") == "false"


def _parse_failure(answer: HttpResponse) -> Failed:
    """Build the failure that the server reports, with its own kind if it is a gymsdk server."""
    failure = client.build_refusal_error(answer.host, answer.status, answer.text, retry_after=answer.retry_after)
    value = parse_value(answer)
    detail = value.get("error") if isinstance(value, dict) else None
    code = detail.get("code") if isinstance(detail, dict) else None
    if not (isinstance(detail, dict) and isinstance(code, str) and FAILURE_PATTERN.fullmatch(code)):
        return failure
    is_retryable = answer.headers.get("retry-after") is not None
    return Failed(str(detail.get("message")), kind=code, retryable=is_retryable, retry_after=answer.retry_after)
