"""Send rows to the agents of a run, and collect the rollouts in the order in which they end."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias
from uuid import uuid4

from aiohttp import ClientResponseError, RequestInfo
from multidict import CIMultiDict, CIMultiDictProxy
from pydantic import BaseModel, Field
from yarl import URL

from gymsdk.client import VERSION_KEY, UnknownServer
from gymsdk.config.model import AGENTS
from gymsdk.errors import Failed
from gymsdk.rollouts.agent_client import AgentClient
from gymsdk.rollouts.remote import build_refusal
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.server_utils import ServerClient

__all__ = ["RolloutCollectionHelper", "RunError"]

ROLLOUT_ID_KEY = "_ng_rollout_id"

VERL = "verl"
"""The package of the trainer verl."""

NOT_FOUND_STATUS, BAD_ANSWER_STATUS, UNAVAILABLE_STATUS = 404, 502, 503

REFUSED_STATUSES = frozenset({400, 413, 422})
"""The statuses of a row that is wrong. An agent that is not found may be on a node that is lost, so 404 is none."""

NOT_PLAYED_STATUSES = frozenset({429, BAD_ANSWER_STATUS, UNAVAILABLE_STATUS, 504})
"""The statuses that say nothing of the rollout, as in NeMo Gym."""

MAX_BODY_CHARS = 2000
"""The longest part of a response in a failed row, in characters."""

log = logging.getLogger("gymsdk")

Played: TypeAlias = tuple[dict[str, Any], dict[str, Any]]
"""A row and the agent's result."""


class RunError(ClientResponseError):
    """An agent did not play a row.

    It is an aiohttp error, because trainers tell failures of the infrastructure from wrong rows by its `status`. Unlike
    aiohttp's own errors, it can be pickled, so that it can leave a Ray actor.

    Args:
        status: The status: 4xx if the row or its agent is wrong, 5xx if the infrastructure failed. It is 503 if there
            was no response.
        message: What happened.
        url: The URL of the request.
        response_content: The body of the response.
    """

    def __init__(self, status: int, message: str, url: str, response_content: bytes = b"") -> None:
        headers: CIMultiDictProxy[str] = CIMultiDictProxy(CIMultiDict())
        super().__init__(RequestInfo(URL(url), "POST", headers, URL(url)), (), status=status, message=message)
        self.response_content = response_content
        self._arguments = (status, message, url, response_content)

    def __reduce__(self) -> tuple[type[RunError], tuple[int, str, str, bytes]]:
        """Return the arguments, because `args` has headers that cannot be pickled."""
        return RunError, self._arguments


class RolloutCollectionHelper(BaseModel):
    """Plays rows with the agents of a run.

    Attributes:
        request_seconds: The time limit of one rollout, in seconds. The agents have shorter limits of their own.
    """

    request_seconds: float = Field(3600.0, gt=0)

    def run_examples(
        self,
        examples: Sequence[dict[str, Any]],
        head_server_config: BaseServerConfig | None = None,
        semaphore: asyncio.Semaphore | None = None,
        route_failures_to_sidecar: bool = False,
    ) -> Iterator[Awaitable[Played]]:
        """Send each row to the agent that it names; call this inside an event loop.

        verl's recipe ends the whole batch at the first error. In a process with verl, a row that is refused therefore
        has a result without output, which the recipe replaces, unless all rows are refused.

        Args:
            examples: The rows. A row names its agent in `agent_ref`, as in `{"name": "math_simple_agent"}`; a row that
                names a `task_source` instead gets the `agent_ref` of the agent with this resources server.
            head_server_config: The address of the head server, by default that of this process's latest run.
            semaphore: Limits the rows that are played at the same time.
            route_failures_to_sidecar: Whether a row that is not played has a result with `_ng_failure_` keys, and
                without a reward, instead of an error.

        Returns:
            An iterator of awaitables in the order in which the rollouts end. Each returns the row, which is the same
            object, and the agent's result, or raises `RunError`. If the iterator is dropped, the remaining rollouts are
            cancelled.

        Raises:
            ValueError: A row names neither an agent nor a known task source. No row has been sent.
        """
        server_client = ServerClient.load_from_global_config(head_server_config)
        resolve_agents(examples, server_client.global_config_dict)
        agents = AgentClient(
            server_client.connect(self.request_seconds),
            self.request_seconds,
            once=VERSION_KEY in server_client.global_config_dict,
        )
        slots = semaphore or nullcontext()
        refused: list[RunError] = []

        async def play(row: dict[str, Any]) -> Played:
            async with slots:
                try:
                    return row, await run_row(agents, row)
                except RunError as error:
                    if route_failures_to_sidecar:
                        return row, build_failed_result(error)
                    if VERL not in sys.modules or error.status not in REFUSED_STATUSES:
                        raise
                    refused.append(error)
                    if len(refused) == len(examples):
                        raise
                    log.warning("verl gets no rollout of a row that is refused (%s): %s", error.status, error.message)
                    return row, {**build_failed_result(error), "response": {"output": []}}

        return _iterate_completed([partial(play, row) for row in examples])

    def setup_server_client(self, head_server_config: BaseServerConfig | None = None) -> ServerClient:
        """Return a client of the servers, as `ServerClient.load_from_global_config` does."""
        return ServerClient.load_from_global_config(head_server_config)


def resolve_agents(rows: Sequence[dict[str, Any]], config: Mapping[str, Any]) -> None:
    """Add an `agent_ref` to each row that has only a `task_source`: the agent with this resources server.

    Args:
        rows: The rows, which are changed in place.
        config: The configuration of the run, with a block for each server.

    Raises:
        ValueError: A row names neither an agent nor a task source with an agent; no row has been changed.
    """
    agents = dict(_iter_agents(config))
    wrong = [number for number, row in enumerate(rows) if not _has_agent(row) and row.get("task_source") not in agents]
    if wrong:
        row = rows[wrong[0]]
        problem = f"names task_source {row['task_source']!r}" if "task_source" in row else "names no agent"
        raise ValueError(
            f"row {wrong[0]} {problem} ({len(wrong)} of {len(rows)} rows are wrong); write agent_ref: {{name: AGENT}}"
            f" into each row; the agents are {', '.join(agents.values()) or 'none'}"
        )
    for row in rows:
        if not _has_agent(row):
            row["agent_ref"] = {"type": AGENTS, "name": agents[row["task_source"]]}


async def run_row(agents: AgentClient, row: Mapping[str, Any]) -> dict[str, Any]:
    """Play *row* with the agent that it names, and return the agent's result.

    Raises:
        RunError: The agent does not exist, or did not play the row.
    """
    name = row["agent_ref"]["name"]
    # With an ID, a server of gymsdk plays the row once, even if a lost connection makes the client send it again.
    sent = {ROLLOUT_ID_KEY: uuid4().hex, **row}
    url = f"{agents.client.head}/{name}/run"
    try:
        response = await agents.run(name, sent)
    except Failed as error:
        status = NOT_FOUND_STATUS if isinstance(error, UnknownServer) else UNAVAILABLE_STATUS
        raise RunError(status, str(error), url) from None
    if not response.ok:
        raise RunError(response.status, str(build_refusal(response, "host")), url, response.body)
    try:
        result = await response.json_async()
    except Failed as error:
        raise RunError(BAD_ANSWER_STATUS, str(error), url) from None
    if not isinstance(result, dict):
        raise RunError(BAD_ANSWER_STATUS, f"{name} answered without a JSON object", url, response.body)
    return result


def build_failed_result(error: RunError) -> dict[str, Any]:
    """Return the result that NeMo Gym has for a row that was not played; it has no reward and no response."""
    played = error.status not in NOT_PLAYED_STATUSES
    return {
        "_ng_failure_class": "agent_run_error" if played else "agent_request_failed",
        "_ng_failure_type": type(error).__name__,
        "_ng_failure_message": error.message,
        "_ng_failure_http_status": error.status,
        "_ng_failure_response_body": error.response_content.decode("utf-8", "replace")[:MAX_BODY_CHARS] or None,
    }


def _has_agent(row: Mapping[str, Any]) -> bool:
    reference = row.get("agent_ref")
    return isinstance(reference, Mapping) and bool(reference.get("name"))


def _iter_agents(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each agent's resources server, and the name of the agent."""
    for name, block in config.items():
        implementations = block.get(AGENTS) if isinstance(block, Mapping) else None
        for agent in (implementations or {}).values():
            reference = agent.get("resources_server") if isinstance(agent, Mapping) else None
            if reference is not None:
                yield str(reference["name"]), str(name)


def _iterate_completed(
    plays: Sequence[Callable[[], Coroutine[Any, Any, Played]]],
) -> Iterator[Awaitable[Played]]:
    """Start all *plays* with the first step of the iterator, and yield an awaitable for each in order of completion.

    If the iterator is dropped, the tasks that no yielded awaitable waits for are cancelled.
    """
    tasks = [asyncio.ensure_future(play()) for play in plays]
    yielded = 0

    def cancel_surplus(_: object = None) -> None:
        if sum(future.done() for future in tasks) >= yielded:
            for surplus in tasks:
                surplus.cancel()

    try:
        for completed in asyncio.as_completed(tasks):
            yielded += 1
            yield completed
    except GeneratorExit:
        cancel_surplus()
        for task in tasks:
            if not task.done():
                task.add_done_callback(cancel_surplus)
        raise
