"""A survey: how the servers of one head are, each asked for its figures, and what is wrong with them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from gymsdk import credentials, http, reasons
from gymsdk.addresses import public
from gymsdk.client import HEAD
from gymsdk.errors import Failed
from gymsdk.http import Answer, Headers
from gymsdk.servers.nodes.reports import ITSELF, Exit, Instance, Nodes
from gymsdk.servers.watching import watch
from gymsdk.servers.watching.health import Status
from gymsdk.told import value_of

SLOW = 0.1
"""Seconds from the head to a server and back, above which that is marked."""

IDLE = 0.5
"""The share of its time at work below which a GPU is marked."""

RECENT = 600.0
"""Seconds for which an exit that went wrong is wrong: a server that has been started anew since is well."""

PATIENCE = 5.0
"""Seconds that each of them may take to answer."""

MISSING = 404
SERVER_ERROR = 500

SAMPLE = re.compile(r"^gymsdk_(\w+)\{(.*)\} ([^ ]+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

FIELDS = {
    "uptime": frozenset({"uptime_seconds"}),
    "sessions": frozenset({"sessions_open", "agent_sessions_open"}),
    "in_flight": frozenset({"requests_in_flight"}),
}
"""What of a server's figures is shown as what."""

Wrong: TypeAlias = Literal["missing", "unhealthy", "exit", "slow"]
Figures: TypeAlias = list[tuple[str, dict[str, str], float]]
"""The samples of one server: name, labels, value."""


class Row(BaseModel):
    """One instance of a server, or the place of one that is missing; what is not known is `None`.

    *gpus* are those of its machine, by number, with the share of the time in which each was at work.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    kind: str | None = None
    node: str = ""
    url: str | None = None
    health: str = "missing"
    exit_code: int | None = None
    exit_at: float | None = None
    restarts: int | None = None
    uptime: float | None = None
    sessions: int | None = None
    in_flight: int | None = None
    round_trip: float | None = None
    gpus: dict[str, float] = {}
    wrong: list[Wrong] = []

    @property
    def idle(self) -> bool:
        """Whether one of its GPUs is used less than it could be; that is worth a look, and nothing wrong."""
        return any(used < IDLE for used in self.gpus.values())


class Lost(BaseModel):
    """A node that is heard of no more, for *age* seconds now, though it did not leave, and the *servers* it had."""

    model_config = ConfigDict(frozen=True)

    id: str
    servers: list[str]
    age: float


class Survey(BaseModel):
    """All servers of the head at a URL, how many of those *expected* are *registered*, who measured the round trips.

    *lost* are the nodes that went with their servers not long ago, and are not back. A head that has begun not long
    ago, and is not *settled*, may not have heard of all.
    """

    model_config = ConfigDict(frozen=True)

    head: str
    nodes: int
    expected: int
    registered: int
    round_trip_by: Literal["head", "command"]
    servers: list[Row]
    settled: bool = True
    lost: list[Lost] = []

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.lost and not any(each.wrong for each in self.servers)


async def survey(head: str = HEAD, *, token: SecretStr | str | None = None) -> Survey:
    """Give how the servers of *head* are, ours or NeMo Gym's; raises `Failed` where none answers."""
    head, carried = head.rstrip("/"), credentials.carried(token)
    nodes = await _nodes(head, carried)
    urls = {each.url: each for each in nodes.instances}
    answers = dict(
        zip([head, *urls], await asyncio.gather(*(_figures(url, carried) for url in [head, *urls])), strict=True)
    )
    by_head = any(each.round_trip is not None for each in nodes.instances)
    rows = [_head(head, answers[head], nodes.exits.get(ITSELF))]
    rows += [_row(each, _ended(each, nodes), answers[each.url], by_head=by_head) for each in nodes.instances]
    rows += [_missing(name, nodes.exits.get(name)) for name in watch.missing(nodes)]
    expected = watch.expected(nodes)
    return Survey(
        head=public(head),
        nodes=watch.beside(nodes),
        expected=len(expected),
        registered=len(expected) - len(watch.missing(nodes)),
        round_trip_by="head" if by_head else "command",
        servers=rows,
        settled=nodes.settled,
        lost=[Lost.model_validate(each) for each in nodes.lost],
    )


def _ended(instance: Instance, nodes: Nodes) -> Exit | None:
    """Give how the process before *instance* ended, or that of another of its name which is not there again."""
    known = any(each.exit for each in nodes.instances if each.name == instance.name)
    return instance.exit if known else nodes.exits.get(instance.name)


async def _nodes(head: str, carried: Headers) -> Nodes:
    answer = await _asked(head, "/nodes", carried)
    value = value_of(answer)
    if answer.status == MISSING:
        # NeMo Gym's head: it has a list of its servers, and nothing else.
        answer = await _asked(head, "/server_instances", carried)
        value = _listed(value_of(answer))
    # Whatever it says where it refuses, and what is no head's, would do for one without any server.
    if not answer.ok or not isinstance(value, dict) or "instances" not in value:
        raise _no_head(answer)
    try:
        return Nodes.model_validate(value)
    except ValidationError:
        raise _no_head(answer) from None


def _no_head(answer: Answer) -> Failed:
    """Give the failure to be told of servers: by a head that cannot just now, or by what is none."""
    if answer.status >= SERVER_ERROR:
        said, _ = reasons.refusal(answer.text)
        words = ": ".join(filter(None, (f"it answered {answer.status}", said)))
        message = f"{answer.host} does not say how its servers are: {words}"
        return Failed(f"{message}; ask again, or look at its log", kind="head_error", stage="host", retryable=True)
    message = f"{answer.host} is no head: it answered {answer.status} to what a head is asked"
    return Failed(f"{message}; name the right one with --head", kind="head_error", stage="host")


async def _asked(head: str, path: str, carried: Headers) -> Answer:
    try:
        answer = await http.get(head + path, headers=carried, timeout=PATIENCE, retry=http.ONCE)
    except Failed as error:
        sentence = f"no head answers at {public(head)} ({error})"
        cure = "start one with `gymsdk serve NAME`, or name another with --head"
        raise Failed(f"{sentence}; {cure}", kind="server_unreachable", stage="host", retryable=True) from None
    if answer.status == credentials.UNAUTHORIZED:
        raise credentials.refused(answer.host, had_token=bool(carried))
    return answer


def _listed(value: object) -> dict[str, object] | None:
    """Give what NeMo Gym's head lists as ours tells it, `None` where that is no list of servers."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    return {"instances": [_instance(each) for each in value]}


def _instance(told: Mapping[str, object]) -> dict[str, object]:
    """Give what NeMo Gym's head tells of a server in the words of ours."""
    name = told.get("process_name")
    return {
        "id": f"{name}@{told.get('url')}",
        "name": name,
        "kind": told.get("server_type"),
        "implementation": told.get("name"),
        "url": told.get("url") or f"http://{told.get('host')}:{told.get('port')}",
        "status": told.get("status"),
        "started": told.get("start_time") or 0.0,
    }


class _Heard(BaseModel):
    """What a server says of itself, how it answers, in what time; *figures* are `None` where it says nothing."""

    model_config = ConfigDict(frozen=True)

    health: Status = "success"
    figures: Figures | None = None
    seconds: float | None = None


async def _figures(url: str, carried: Headers) -> _Heard:
    began = time.perf_counter()
    try:
        answer = await http.get(url + "/metrics", headers=carried, timeout=PATIENCE, retry=http.ONCE)
    except Failed as error:
        return _Heard(health="timeout" if error.kind == "model_timeout" else "connection_error")
    # What has no figures, as a server of NeMo Gym's, is there all the same.
    health: Status = "success" if answer.status < SERVER_ERROR else "unknown_error"
    figures = [*samples(answer.text)] if answer.ok else None
    return _Heard(health=health, figures=figures, seconds=time.perf_counter() - began)


def samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield our own samples in a text that Prometheus would read."""
    for name, labels, value in SAMPLE.findall(text):
        yield name, dict(LABEL.findall(labels)), float(value)


def _head(url: str, heard: _Heard, ended: Exit | None) -> Row:
    about = {"name": "head", "kind": "head", "url": public(url), "health": heard.health}
    return Row(**about, wrong=[*_wrong(heard.health, None, ended)], **_exit(ended), **_told(heard))


def _row(instance: Instance, ended: Exit | None, heard: _Heard, *, by_head: bool) -> Row:
    trip = instance.round_trip if by_head else heard.seconds
    health = instance.status or heard.health
    told = {"sessions": instance.load.sessions, "in_flight": instance.load.in_flight, **_told(heard)}
    if told.get("uptime") is None and instance.started:
        told["uptime"] = max(0.0, time.time() - instance.started)
    return Row(
        name=instance.name,
        kind=instance.kind,
        node=instance.node,
        url=instance.url,
        health="draining" if instance.draining and health == "success" else health,
        round_trip=trip,
        wrong=[*_wrong(health, trip, ended)],
        **_exit(ended),
        **told,
    )


def _missing(name: str, ended: Exit | None) -> Row:
    return Row(name=name, wrong=["missing", *(["exit"] if _went_wrong(ended) else [])], **_exit(ended))


def _wrong(health: str, trip: float | None, ended: Exit | None) -> Iterator[Wrong]:
    if health != "success":
        yield "unhealthy"
    if _went_wrong(ended):
        yield "exit"
    if trip is not None and trip > SLOW:
        yield "slow"


def _went_wrong(ended: Exit | None) -> bool:
    return ended is not None and ended.code != 0 and time.time() - ended.at < RECENT


def _exit(ended: Exit | None) -> dict[str, float | int]:
    return {} if ended is None else {"exit_code": ended.code, "exit_at": ended.at, "restarts": ended.restarts}


def _told(heard: _Heard) -> dict[str, object]:
    """Give what a server's own figures say, as far as they do."""
    if heard.figures is None:
        return {}
    sums = {field: _sum(heard.figures, names) for field, names in FIELDS.items()}
    used = {labels["gpu"]: value for name, labels, value in heard.figures if name == "gpu_utilization_ratio"}
    return {field: value for field, value in sums.items() if value is not None} | {"gpus": used}


def _sum(figures: Figures, names: frozenset[str]) -> float | None:
    values = [value for name, _, value in figures if name in names]
    return sum(values) if values else None
