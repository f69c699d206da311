"""A client of a resources server, gymsdk's or NeMo Gym's, with the interface of an environment."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from pydantic import ConfigDict, SecretStr, ValidationError

from gymsdk import credentials, errors, responses
from gymsdk.client import build_bad_answer_error, build_failure, parse_failure, parse_object, parse_verdict
from gymsdk.errors import BadRow, Failed
from gymsdk.http import client
from gymsdk.http.client import HttpResponse
from gymsdk.rollouts.folder import StoredVerdict
from gymsdk.servers.app import RequestRejected
from gymsdk.servers.discovery import is_local_host
from gymsdk.servers.tool_calls import CLIENT_HEADER, SessionConnection, call_tool
from gymsdk.types import Action, Episode, Item, Message, Row, State, Step, Task, Transcript, Verdict

INVALID_ROW_STATUSES = frozenset({413, 422})
"""Statuses of requests that would fail again."""


class RemoteState(State):
    """The local state of a remote episode: the connection to its session."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    connection: SessionConnection


class RemoteEnvironment:
    """An environment at a resources server.

    Tools are called once, never retried. A plain reply ends the episode: NeMo Gym's protocol has no answer to a reply.

    Args:
        base_url: The server's URL.
        name: The environment's name.
        seconds: The timeout of a call.
        retry: Retries of calls that are safe to repeat.
        headers: Further headers of each request.
        token: The server's token; by default the one in the file that `GYMSDK_TOKEN_FILE` names.
    """

    def __init__(
        self,
        base_url: str,
        name: str,
        *,
        seconds: float = 600.0,
        retry: client.Retry = client.DEFAULT_RETRY,
        headers: client.Headers | None = None,
        token: SecretStr | str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.name = name
        self._seconds = seconds
        self._retry = retry
        self._token = credentials.resolve_auth_headers(token)
        self._headers: client.Headers = {CLIENT_HEADER: "1", **self._token, **(headers or {})}

    def __repr__(self) -> str:
        return f"<RemoteEnvironment {self.name!r} at {self.base_url}>"

    def open_connection(self, cookies: Mapping[str, str] | None = None) -> SessionConnection:
        """Return a connection to the session of these cookies, or to a session that is not open yet."""
        return SessionConnection(self.base_url, dict(cookies or {}), self._headers, self._seconds, self._retry)

    def auth_headers(self, base_url: str) -> client.Headers:
        """Return the headers for requests to `base_url`: the token, if `base_url` is this server."""
        return self._token if self._token and _is_same_server(base_url.rstrip("/"), self.base_url) else {}

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open a session of `row`.

        Raises:
            BadRow: The row does not fit the environment.
            EpisodeError: The server failed or did not answer.
        """
        task, raw = _read_row(row)
        connection = self.open_connection()
        body = {**raw, "gymsdk": {"seed": seed, "repeat": repeat}}
        answer = await connection.post("/seed_session", body, stage="reset", deadline=deadline)
        if not answer.ok:
            raise _open_failure(answer, self.name)
        extras = _read_extras(parse_object(answer, "reset"))
        # Only gymsdk's servers return the opening; others may echo the request's `gymsdk` field.
        connection.is_gymsdk = "opening" in extras
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=raw,
            environment=self,
            state=RemoteState(connection=connection),
            transcript=Transcript(opening=extras.get("opening", deepcopy(task.input))),
            tools=extras.get("tools", _read_tools(task.responses_create_params.get("tools"))),
            repeat=repeat,
            deadline=deadline,
        )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply; rewards of steps are part of the verdict's reward."""
        if isinstance(action, Message):
            return Step(done=True)
        return await call_tool(_connection_of(episode), action, episode.tools, deadline=episode.deadline)

    async def verify(self, episode: Episode) -> Verdict:
        """Return the verdict on the transcript, which includes the rewards of the steps."""
        connection, body = _connection_of(episode), _build_verify_body(episode)
        try:
            answer = await connection.post("/verify", body, stage="verify")
        except Failed as error:
            if error.kind != "server_unreachable":
                raise
            # Judging is idempotent, so a lost connection is retried once.
            answer = await connection.post("/verify", body, stage="verify")
        if not answer.ok:
            raise build_failure(answer, "verify")
        return _parse_verdict(answer, episode.row)

    async def close(self, episode: Episode) -> None:
        """Close the session, if the server is gymsdk's; NeMo Gym's servers have no endpoint for it."""
        connection = _connection_of(episode)
        if not connection.is_gymsdk:
            return
        answer = await connection.post("/close_session", {}, stage="close")
        if not answer.ok:
            raise build_failure(answer, "close")

    async def aggregate(self, body: Row) -> Item:
        """Return the metrics of the verified rows in `body`, as the server computes them.

        Raises:
            RequestRejected: The server rejects the rows.
        """
        answer = await self.open_connection().post("/aggregate_metrics", body, stage="metrics")
        if answer.ok:
            return parse_object(answer, "metrics")
        if answer.status in INVALID_ROW_STATUSES and parse_failure(answer) is None:
            raise RequestRejected(answer.status, answer.text[: client.MAX_EXCERPT_CHARS])
        raise build_failure(answer, "metrics")


def _is_same_server(url: str, other: str) -> bool:
    """Return whether two URLs lead to the same server, possibly by different addresses of this machine."""
    if url == other:
        return True
    try:
        parsed, parsed_other = urlsplit(url), urlsplit(other)
        is_same_path = (parsed.scheme, parsed.port, parsed.path) == (
            parsed_other.scheme,
            parsed_other.port,
            parsed_other.path,
        )
        # Only literal addresses: resolving a name that a client chose would be unsafe.
        addresses = [
            ip_address((parts.hostname or "").replace("localhost", "127.0.0.1")) for parts in (parsed, parsed_other)
        ]
    except ValueError:
        return False
    return is_same_path and all(is_local_host(str(address)) for address in addresses)


def _read_row(row: Row | Task) -> tuple[Task, Row]:
    try:
        return (row, row.row()) if isinstance(row, Task) else (Task.model_validate(row), row)
    except ValidationError as error:
        raise BadRow(f"the row is invalid: {errors.format_validation_error(error)}") from None


def _open_failure(answer: HttpResponse, name: str) -> BadRow | Exception:
    if answer.status == 422 and parse_failure(answer) is None:  # noqa: PLR2004 - an invalid row
        return BadRow(
            f"the row does not fit environment {name!r} at {answer.host}: {answer.text[: client.MAX_EXCERPT_CHARS]}"
        )
    return build_failure(answer, "reset")


def _read_extras(body: Item) -> Item:
    extras = body.get("gymsdk")
    return extras if isinstance(extras, dict) else {}


def _read_tools(tools: Any) -> list[Item]:
    return [tool for tool in tools or [] if isinstance(tool.get("name"), str)]


def _connection_of(episode: Episode) -> SessionConnection:
    assert isinstance(episode.state, RemoteState), "the remote environment opened the episode"
    return episode.state.connection


def _build_verify_body(episode: Episode) -> Row:
    """Build the body of `/verify`: the row, and the transcript as a model's response."""
    ended = episode.transcript.ended
    status: responses.ResponseStatus = "incomplete" if ended == "tokens" else "completed"
    response = responses.build_response(episode.transcript.items, model="policy", status=status)
    options = {"seed": episode.seed, "repeat": episode.repeat, "ended": ended}
    return {**episode.row, "response": response, "gymsdk": options}


def _parse_verdict(answer: HttpResponse, row: Row) -> Verdict:
    judgement = parse_verdict(parse_object(answer, "verify"), row)
    try:
        return StoredVerdict.model_validate(
            {**judgement.fields, "reward": judgement.reward, "components": judgement.components}
        )
    except ValidationError as error:
        raise build_bad_answer_error(
            f"the verdict of {answer.host} is invalid: {errors.format_validation_error(error)}", "verify"
        ) from None
