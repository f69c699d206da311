"""Remote: an environment behind a resources server, ours or NeMo Gym's, as something an episode is played against."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from pydantic import ConfigDict, SecretStr, ValidationError

from gymsdk import complaints, credentials, http, told, wire
from gymsdk.errors import BadRow, Failed
from gymsdk.http import Answer
from gymsdk.rollouts.lines import StoredVerdict
from gymsdk.servers.app import Refused
from gymsdk.servers.nodes.finding import is_own
from gymsdk.servers.wire.calling import Line, call
from gymsdk.servers.wire.tools import CLIENT
from gymsdk.transcript import Action, Item, Message, Transcript
from gymsdk.types import Episode, Row, State, Step, Task, Verdict

UNFIT = frozenset({413, 422})
"""The statuses of what does not fit, and would not at another time."""


class Held(State):
    """What an episode elsewhere is known by here: the line to its session."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    line: Line


class Remote:
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
        retry: http.Retry = http.RETRY,
        headers: http.Headers | None = None,
        token: SecretStr | str | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.name = name
        self._seconds = seconds
        self._retry = retry
        self._token = credentials.carried(token)
        self._headers: http.Headers = {CLIENT: "1", **self._token, **(headers or {})}

    def __repr__(self) -> str:
        return f"<Remote {self.name!r} at {self.base_url}>"

    def open_connection(self, jar: Mapping[str, str] | None = None) -> Line:
        """Give a line to the session that the cookies in *jar* are for, or to one that is yet to be opened."""
        return Line(self.base_url, dict(jar or {}), self._headers, self._seconds, self._retry)

    def auth_headers(self, base_url: str) -> http.Headers:
        """Give what requests to *base_url* carry: the token where that is this server, as others may call it."""
        return self._token if self._token and _is_one(base_url.rstrip("/"), self.base_url) else {}

    async def reset(
        self, row: Row | Task, *, seed: int = 0, id: str = "", repeat: int = 0, deadline: float | None = None
    ) -> Episode:
        """Open a session of *row*; raises `BadRow` where it does not fit, else `EpisodeError`."""
        task, raw = _read(row)
        line = self.open_connection()
        body = {**raw, "gymsdk": {"seed": seed, "repeat": repeat}}
        answer = await line.post("/seed_session", body, stage="reset", deadline=deadline)
        if not answer.ok:
            raise _unopened(answer, self.name)
        shown = _ours(told.object_of(answer, "reset"))
        # Who sends back what it was sent is not for that one of ours.
        line.is_gymsdk = "opening" in shown
        return Episode(
            id=id,
            seed=seed,
            task=task,
            row=raw,
            environment=self,
            state=Held(line=line),
            transcript=Transcript(opening=shown.get("opening", deepcopy(task.input))),
            tools=shown.get("tools", _named(task.responses_create_params.get("tools"))),
            repeat=repeat,
            deadline=deadline,
        )

    async def step(self, episode: Episode, action: Action) -> Step:
        """Answer one tool call or reply; what a tool pays is in the verdict's reward."""
        if isinstance(action, Message):
            return Step(done=True)
        return await call(_line(episode), action, episode.tools, deadline=episode.deadline)

    async def verify(self, episode: Episode) -> Verdict:
        """Give the verdict on the transcript, which holds what the steps paid; raises `EpisodeError`."""
        line, body = _line(episode), _verified(episode)
        try:
            answer = await line.post("/verify", body, stage="verify")
        except Failed as error:
            if error.kind != "server_unreachable":
                raise
            # Judging again does nothing that judging has not: a connection that is lost meanwhile loses no rollout.
            answer = await line.post("/verify", body, stage="verify")
        if not answer.ok:
            raise told.refused(answer, "verify")
        return _verdict(answer, episode.row)

    async def close(self, episode: Episode) -> None:
        """Close the session, where the server is one that has an end for it."""
        line = _line(episode)
        if not line.is_gymsdk:
            return
        answer = await line.post("/close_session", {}, stage="close")
        if not answer.ok:
            raise told.refused(answer, "close")

    async def aggregate(self, body: Row) -> Item:
        """Give the figures over the verified rows in *body*, as the server makes them; raises `Refused`."""
        answer = await self.open_connection().post("/aggregate_metrics", body, stage="metrics")
        if answer.ok:
            return told.object_of(answer, "metrics")
        if answer.status in UNFIT and told.broken(answer) is None:
            raise Refused(answer.status, answer.text[: http.EXCERPT])
        raise told.refused(answer, "metrics")


def _is_one(one: str, other: str) -> bool:
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
    return same and all(is_own(str(each)) for each in addresses)


def _read(row: Row | Task) -> tuple[Task, Row]:
    try:
        return (row, row.row()) if isinstance(row, Task) else (Task.model_validate(row), row)
    except ValidationError as error:
        raise BadRow(f"the row is none: {complaints.sentence(error)}") from None


def _unopened(answer: Answer, name: str) -> BadRow | Exception:
    if answer.status == 422 and told.broken(answer) is None:  # noqa: PLR2004 - what does not fit
        return BadRow(f"the row does not fit environment {name!r} at {answer.host}: {answer.text[: http.EXCERPT]}")
    return told.refused(answer, "reset")


def _ours(body: Item) -> Item:
    shown = body.get("gymsdk")
    return shown if isinstance(shown, dict) else {}


def _named(written: Any) -> list[Item]:
    return [tool for tool in written or [] if isinstance(tool.get("name"), str)]


def _line(episode: Episode) -> Line:
    assert isinstance(episode.state, Held), "an episode elsewhere is opened by its remote"
    return episode.state.line


def _verified(episode: Episode) -> Row:
    """Give what is to be verified: the row, and the response as the last of a real model's would be."""
    ended = episode.transcript.ended
    status: wire.Status = "incomplete" if ended == "tokens" else "completed"
    response = wire.response(episode.transcript.items, model="policy", status=status)
    ours = {"seed": episode.seed, "repeat": episode.repeat, "ended": ended}
    return {**episode.row, "response": response, "gymsdk": ours}


def _verdict(answer: Answer, row: Row) -> Verdict:
    found = told.judgement(told.object_of(answer, "verify"), row)
    try:
        return StoredVerdict.model_validate({**found.fields, "reward": found.reward, "components": found.components})
    except ValidationError as error:
        raise told.unread(f"the verdict of {answer.host} is none: {complaints.sentence(error)}", "verify") from None
