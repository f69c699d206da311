"""Remote: an environment behind a resources server, ours or NeMo Gym's, as something an episode is played against."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from pydantic import ConfigDict, SecretStr, ValidationError

from gymsdk import client as told
from gymsdk import credentials, errors, responses
from gymsdk.errors import BadRow, Failed
from gymsdk.http import client
from gymsdk.http.client import HttpResponse
from gymsdk.rollouts.folder import StoredVerdict
from gymsdk.servers.app import RequestRejected
from gymsdk.servers.discovery import is_local_host
from gymsdk.servers.tool_calls import CLIENT_HEADER, SessionConnection, call_tool
from gymsdk.types import Action, Episode, Item, Message, Row, State, Step, Task, Transcript, Verdict

INVALID_ROW_STATUSES = frozenset({413, 422})
"""The statuses of what does not fit, and would not at another time."""


class RemoteState(State):
    """What an episode elsewhere is known by here: the line to its session."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    line: SessionConnection


class RemoteEnvironment:
    """The environment *name* at the resources server *base_url*; *headers* go with every request.

    So does the *token*: if none is given, the one in the file that GYMSDK_TOKEN_FILE names.

    A call has *seconds*, *retry* is how often it is tried again; tools are called once. A plain reply ends the
    episode: of what a server would say to it, clients of NeMo Gym are told nothing.
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
        return f"<Remote {self.name!r} at {self.base_url}>"

    def open_connection(self, jar: Mapping[str, str] | None = None) -> SessionConnection:
        """Give a line to the session that the cookies in *jar* are for, or to one that is yet to be opened."""
        return SessionConnection(self.base_url, dict(jar or {}), self._headers, self._seconds, self._retry)

    def auth_headers(self, base_url: str) -> client.Headers:
        """Give what requests to *base_url* carry: the token where that is this server, as others may call it."""
        return self._token if self._token and _is_same_server(base_url.rstrip("/"), self.base_url) else {}

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open a session of *row*; raises `BadRow` where it does not fit, else `EpisodeError`."""
        task, raw = _read_row(row)
        line = self.open_connection()
        body = {**raw, "gymsdk": {"seed": seed, "repeat": repeat}}
        answer = await line.post("/seed_session", body, stage="reset", deadline=deadline)
        if not answer.ok:
            raise _open_failure(answer, self.name)
        shown = _read_extras(told.parse_object(answer, "reset"))
        # Who sends back what it was sent is not for that one of ours.
        line.is_gymsdk = "opening" in shown
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=raw,
            environment=self,
            state=RemoteState(line=line),
            transcript=Transcript(opening=shown.get("opening", deepcopy(task.input))),
            tools=shown.get("tools", _read_tools(task.responses_create_params.get("tools"))),
            repeat=repeat,
            deadline=deadline,
        )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply; what a tool pays is in the verdict's reward."""
        if isinstance(action, Message):
            return Step(done=True)
        return await call_tool(_connection_of(episode), action, episode.tools, deadline=episode.deadline)

    async def verify(self, episode: Episode) -> Verdict:
        """Give the verdict on the transcript, which holds what the steps paid; raises `EpisodeError`."""
        line, body = _connection_of(episode), _build_verify_body(episode)
        try:
            answer = await line.post("/verify", body, stage="verify")
        except Failed as error:
            if error.kind != "server_unreachable":
                raise
            # Judging again does nothing that judging has not: a connection that is lost meanwhile loses no rollout.
            answer = await line.post("/verify", body, stage="verify")
        if not answer.ok:
            raise told.build_failure(answer, "verify")
        return _parse_verdict(answer, episode.row)

    async def close(self, episode: Episode) -> None:
        """Close the session, where the server is one that has an end for it."""
        line = _connection_of(episode)
        if not line.is_gymsdk:
            return
        answer = await line.post("/close_session", {}, stage="close")
        if not answer.ok:
            raise told.build_failure(answer, "close")

    async def aggregate(self, body: Row) -> Item:
        """Give the figures over the verified rows in *body*, as the server makes them; raises `Refused`."""
        answer = await self.open_connection().post("/aggregate_metrics", body, stage="metrics")
        if answer.ok:
            return told.parse_object(answer, "metrics")
        if answer.status in INVALID_ROW_STATUSES and told.parse_failure(answer) is None:
            raise RequestRejected(answer.status, answer.text[: client.MAX_EXCERPT_CHARS])
        raise told.build_failure(answer, "metrics")


def _is_same_server(one: str, other: str) -> bool:
    """Whether two URLs lead to one server: they are the same, or both lead to one port of this machine."""
    if one == other:
        return True
    try:
        ours, theirs = urlsplit(one), urlsplit(other)
        same = (ours.scheme, ours.port, ours.path) == (theirs.scheme, theirs.port, theirs.path)
        # No name is looked up that somebody else has made up.
        addresses = [ip_address((each.hostname or "").replace("localhost", "127.0.0.1")) for each in (ours, theirs)]
    except ValueError:
        return False
    return same and all(is_local_host(str(each)) for each in addresses)


def _read_row(row: Row | Task) -> tuple[Task, Row]:
    try:
        return (row, row.row()) if isinstance(row, Task) else (Task.model_validate(row), row)
    except ValidationError as error:
        raise BadRow(f"the row is none: {errors.format_validation_error(error)}") from None


def _open_failure(answer: HttpResponse, name: str) -> BadRow | Exception:
    if answer.status == 422 and told.parse_failure(answer) is None:  # noqa: PLR2004 - what does not fit
        return BadRow(
            f"the row does not fit environment {name!r} at {answer.host}: {answer.text[: client.MAX_EXCERPT_CHARS]}"
        )
    return told.build_failure(answer, "reset")


def _read_extras(body: Item) -> Item:
    shown = body.get("gymsdk")
    return shown if isinstance(shown, dict) else {}


def _read_tools(written: Any) -> list[Item]:
    return [tool for tool in written or [] if isinstance(tool.get("name"), str)]


def _connection_of(episode: Episode) -> SessionConnection:
    assert isinstance(episode.state, RemoteState), "an episode elsewhere is opened by its remote"
    return episode.state.line


def _build_verify_body(episode: Episode) -> Row:
    """Give what is to be verified: the row, and the response as the last of a real model's would be."""
    ended = episode.transcript.ended
    status: responses.ResponseStatus = "incomplete" if ended == "tokens" else "completed"
    response = responses.build_response(episode.transcript.items, model="policy", status=status)
    ours = {"seed": episode.seed, "repeat": episode.repeat, "ended": ended}
    return {**episode.row, "response": response, "gymsdk": ours}


def _parse_verdict(answer: HttpResponse, row: Row) -> Verdict:
    found = told.parse_verdict(told.parse_object(answer, "verify"), row)
    try:
        return StoredVerdict.model_validate({**found.fields, "reward": found.reward, "components": found.components})
    except ValidationError as error:
        raise told.build_bad_answer_error(
            f"the verdict of {answer.host} is none: {errors.format_validation_error(error)}", "verify"
        ) from None
