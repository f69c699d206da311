"""A survey: how the servers of one head are, each asked for its figures, and what is wrong with them."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError

from gymsdk import credentials
from gymsdk.client import DEFAULT_HEAD_URL, parse_value
from gymsdk.errors import Failed
from gymsdk.http import client, errors
from gymsdk.http.client import Headers, HttpResponse
from gymsdk.http.tls import redact_url
from gymsdk.observability.health import Status
from gymsdk.observability.metrics import Sample, ServerMetrics
from gymsdk.servers.reports import HEAD_NODE_ID, Exit, HeadSnapshot, Instance

NodesFetcher: TypeAlias = Callable[[str], Awaitable[HeadSnapshot]]
"""Gives all a head knows, for somebody who calls its machine by that name."""


def add_server_metrics(figures: ServerMetrics, look: NodesFetcher) -> None:
    """Have *figures* tell what *look* finds whenever somebody reads them."""
    watch = ServerMonitor(look)
    figures.looks.append(watch.refresh)
    figures.gauges["expected_servers"] = lambda: len(expected_servers(watch.nodes))
    figures.gauges["registered_servers"] = lambda: (
        len(expected_servers(watch.nodes)) - len(missing_servers(watch.nodes))
    )
    figures.gauges["lost_nodes"] = lambda: len(watch.nodes.lost)
    figures.samples["server_up"] = watch.up
    figures.samples["round_trip_seconds"] = watch.round_trips
    figures.samples["last_exit_code"] = watch.exit_codes
    figures.samples["last_exit_time_seconds"] = watch.exit_times
    figures.samples["restarts"] = watch.restarts


def count_nodes(nodes: HeadSnapshot) -> int:
    """Give how many nodes have servers: a supervisor joins, too, and has none of its own."""
    return sum(bool(each.get("servers")) for each in nodes.nodes)


def expected_servers(nodes: HeadSnapshot) -> list[str]:
    """Give the names of the servers that are to be there: those that are told of, and the head's own."""
    own = [each.name for each in nodes.instances if not each.node]
    return list(dict.fromkeys([*nodes.expected, *own]))


def missing_servers(nodes: HeadSnapshot) -> list[str]:
    """Give the names of the servers that are to be there, and of which there is none."""
    there = {each.name for each in nodes.instances}
    return [name for name in expected_servers(nodes) if name not in there]


class ServerMonitor:
    """What *look* has *found* last."""

    def __init__(self, look: NodesFetcher) -> None:
        self.nodes = HeadSnapshot()
        self._look = look

    async def refresh(self) -> None:
        """Look again."""
        self.nodes = await self._look("127.0.0.1")

    def up(self) -> list[Sample]:
        """Give for each instance whether it answers."""
        return [Sample(float(each.status == "success"), _instance_labels(each)) for each in self._checked_instances()]

    def round_trips(self) -> list[Sample]:
        """Give the seconds each instance took to answer last."""
        return [
            Sample(each.round_trip, _instance_labels(each))
            for each in self._checked_instances()
            if each.round_trip is not None
        ]

    def exit_codes(self) -> list[Sample]:
        """Give how each server ended last that did."""
        return [Sample(ended.code, {"name": name}) for name, ended in self.nodes.exits.items()]

    def exit_times(self) -> list[Sample]:
        """Give when, in seconds since the epoch."""
        return [Sample(ended.at, {"name": name}) for name, ended in self.nodes.exits.items()]

    def restarts(self) -> list[Sample]:
        """Give how often each server has been started anew."""
        return [Sample(ended.restarts, {"name": name}) for name, ended in self.nodes.exits.items()]

    def _checked_instances(self) -> Iterator[Instance]:
        return (each for each in self.nodes.instances if each.status is not None)


def _instance_labels(instance: Instance) -> dict[str, str]:
    return {"name": instance.name, "id": instance.id}


SLOW_SECONDS = 0.1
"""Seconds from the head to a server and back, above which that is marked."""

IDLE_UTILIZATION = 0.5
"""The share of its time at work below which a GPU is marked."""

RECENT_EXIT_SECONDS = 600.0
"""Seconds for which an exit that went wrong is wrong: a server that has been started anew since is well."""

REQUEST_SECONDS = 5.0
"""Seconds that each of them may take to answer."""

NOT_FOUND = 404
SERVER_ERROR = 500

SAMPLE_PATTERN = re.compile(r"^gymsdk_(\w+)\{(.*)\} ([^ ]+)$", re.MULTILINE)
LABEL_PATTERN = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

METRICS_BY_FIELD = {
    "uptime": frozenset({"uptime_seconds"}),
    "sessions": frozenset({"sessions_open", "agent_sessions_open"}),
    "in_flight": frozenset({"requests_in_flight"}),
}
"""What of a server's figures is shown as what."""

Problem: TypeAlias = Literal["missing", "unhealthy", "exit", "slow"]
Samples: TypeAlias = list[tuple[str, dict[str, str], float]]
"""The samples of one server: name, labels, value."""


class ServerStatus(BaseModel):
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
    wrong: list[Problem] = []

    @property
    def idle(self) -> bool:
        """Whether one of its GPUs is used less than it could be; that is worth a look, and nothing wrong."""
        return any(used < IDLE_UTILIZATION for used in self.gpus.values())


class LostNodeStatus(BaseModel):
    """A node that is heard of no more, for *age* seconds now, though it did not leave, and the *servers* it had."""

    model_config = ConfigDict(frozen=True)

    id: str
    servers: list[str]
    age: float


class StatusReport(BaseModel):
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
    servers: list[ServerStatus]
    settled: bool = True
    lost: list[LostNodeStatus] = []

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong."""
        return not self.lost and not any(each.wrong for each in self.servers)


async def fetch_status(head: str = DEFAULT_HEAD_URL, *, token: SecretStr | str | None = None) -> StatusReport:
    """Give how the servers of *head* are, ours or NeMo Gym's; raises `Failed` where none answers."""
    head, carried = head.rstrip("/"), credentials.resolve_auth_headers(token)
    nodes = await _fetch_nodes(head, carried)
    urls = {each.url: each for each in nodes.instances}
    answers = dict(
        zip([head, *urls], await asyncio.gather(*(_fetch_metrics(url, carried) for url in [head, *urls])), strict=True)
    )
    by_head = any(each.round_trip is not None for each in nodes.instances)
    rows = [_build_head_status(head, answers[head], nodes.exits.get(HEAD_NODE_ID))]
    rows += [
        _build_status(each, _last_exit(each, nodes), answers[each.url], by_head=by_head) for each in nodes.instances
    ]
    rows += [_build_missing(name, nodes.exits.get(name)) for name in missing_servers(nodes)]
    expected = expected_servers(nodes)
    return StatusReport(
        head=redact_url(head),
        nodes=count_nodes(nodes),
        expected=len(expected),
        registered=len(expected) - len(missing_servers(nodes)),
        round_trip_by="head" if by_head else "command",
        servers=rows,
        settled=nodes.settled,
        lost=[LostNodeStatus.model_validate(each) for each in nodes.lost],
    )


def _last_exit(instance: Instance, nodes: HeadSnapshot) -> Exit | None:
    """Give how the process before *instance* ended, or that of another of its name which is not there again."""
    known = any(each.exit for each in nodes.instances if each.name == instance.name)
    return instance.exit if known else nodes.exits.get(instance.name)


async def _fetch_nodes(head: str, carried: Headers) -> HeadSnapshot:
    answer = await _get(head, "/nodes", carried)
    value = parse_value(answer)
    if answer.status == NOT_FOUND:
        # NeMo Gym's head: it has a list of its servers, and nothing else.
        answer = await _get(head, "/server_instances", carried)
        value = _parse_listed(parse_value(answer))
    # Whatever it says where it refuses, and what is no head's, would do for one without any server.
    if not answer.ok or not isinstance(value, dict) or "instances" not in value:
        raise _head_error(answer)
    try:
        return HeadSnapshot.model_validate(value)
    except ValidationError:
        raise _head_error(answer) from None


def _head_error(answer: HttpResponse) -> Failed:
    """Give the failure to be told of servers: by a head that cannot just now, or by what is none."""
    if answer.status >= SERVER_ERROR:
        said, _ = errors.parse_refusal(answer.text)
        words = ": ".join(filter(None, (f"it answered {answer.status}", said)))
        message = f"{answer.host} does not say how its servers are: {words}"
        return Failed(f"{message}; ask again, or look at its log", kind="head_error", stage="host", retryable=True)
    message = f"{answer.host} is no head: it answered {answer.status} to what a head is asked"
    return Failed(f"{message}; name the right one with --head", kind="head_error", stage="host")


async def _get(head: str, path: str, carried: Headers) -> HttpResponse:
    try:
        answer = await client.get(head + path, headers=carried, timeout=REQUEST_SECONDS, retry=client.NO_RETRY)
    except Failed as error:
        sentence = f"no head answers at {redact_url(head)} ({error})"
        cure = "start one with `gymsdk serve NAME`, or name another with --head"
        raise Failed(f"{sentence}; {cure}", kind="server_unreachable", stage="host", retryable=True) from None
    if answer.status == credentials.UNAUTHORIZED:
        raise credentials.build_unauthorized_error(answer.host, had_token=bool(carried))
    return answer


def _parse_listed(value: object) -> dict[str, object] | None:
    """Give what NeMo Gym's head lists as ours tells it, `None` where that is no list of servers."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return None
    return {"instances": [_parse_instance(each) for each in value]}


def _parse_instance(told: Mapping[str, object]) -> dict[str, object]:
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


class _ServerReply(BaseModel):
    """What a server says of itself, how it answers, in what time; *figures* are `None` where it says nothing."""

    model_config = ConfigDict(frozen=True)

    health: Status = "success"
    figures: Samples | None = None
    seconds: float | None = None


async def _fetch_metrics(url: str, carried: Headers) -> _ServerReply:
    began = time.perf_counter()
    try:
        answer = await client.get(url + "/metrics", headers=carried, timeout=REQUEST_SECONDS, retry=client.NO_RETRY)
    except Failed as error:
        return _ServerReply(health="timeout" if error.kind == "model_timeout" else "connection_error")
    # What has no figures, as a server of NeMo Gym's, is there all the same.
    health: Status = "success" if answer.status < SERVER_ERROR else "unknown_error"
    figures = [*parse_samples(answer.text)] if answer.ok else None
    return _ServerReply(health=health, figures=figures, seconds=time.perf_counter() - began)


def parse_samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield our own samples in a text that Prometheus would read."""
    for name, labels, value in SAMPLE_PATTERN.findall(text):
        yield name, dict(LABEL_PATTERN.findall(labels)), float(value)


def _build_head_status(url: str, heard: _ServerReply, ended: Exit | None) -> ServerStatus:
    about = {"name": "head", "kind": "head", "url": redact_url(url), "health": heard.health}
    return ServerStatus(
        **about, wrong=[*_find_problems(heard.health, None, ended)], **_exit_fields(ended), **_metric_fields(heard)
    )


def _build_status(instance: Instance, ended: Exit | None, heard: _ServerReply, *, by_head: bool) -> ServerStatus:
    trip = instance.round_trip if by_head else heard.seconds
    health = instance.status or heard.health
    told = {"sessions": instance.load.sessions, "in_flight": instance.load.in_flight, **_metric_fields(heard)}
    if told.get("uptime") is None and instance.started:
        told["uptime"] = max(0.0, time.time() - instance.started)
    return ServerStatus(
        name=instance.name,
        kind=instance.kind,
        node=instance.node,
        url=instance.url,
        health="draining" if instance.draining and health == "success" else health,
        round_trip=trip,
        wrong=[*_find_problems(health, trip, ended)],
        **_exit_fields(ended),
        **told,
    )


def _build_missing(name: str, ended: Exit | None) -> ServerStatus:
    return ServerStatus(name=name, wrong=["missing", *(["exit"] if _is_abnormal(ended) else [])], **_exit_fields(ended))


def _find_problems(health: str, trip: float | None, ended: Exit | None) -> Iterator[Problem]:
    if health != "success":
        yield "unhealthy"
    if _is_abnormal(ended):
        yield "exit"
    if trip is not None and trip > SLOW_SECONDS:
        yield "slow"


def _is_abnormal(ended: Exit | None) -> bool:
    return ended is not None and ended.code != 0 and time.time() - ended.at < RECENT_EXIT_SECONDS


def _exit_fields(ended: Exit | None) -> dict[str, float | int]:
    return {} if ended is None else {"exit_code": ended.code, "exit_at": ended.at, "restarts": ended.restarts}


def _metric_fields(heard: _ServerReply) -> dict[str, object]:
    """Give what a server's own figures say, as far as they do."""
    if heard.figures is None:
        return {}
    sums = {field: _sum_samples(heard.figures, names) for field, names in METRICS_BY_FIELD.items()}
    used = {labels["gpu"]: value for name, labels, value in heard.figures if name == "gpu_utilization_ratio"}
    return {field: value for field, value in sums.items() if value is not None} | {"gpus": used}


def _sum_samples(figures: Samples, names: frozenset[str]) -> float | None:
    values = [value for name, _, value in figures if name in names]
    return sum(values) if values else None
