"""Servers of several worker processes behind one port: who has an id, one `/metrics`, and one pause for all workers."""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse
from starlette.requests import ClientDisconnect

from gymsdk import credentials
from gymsdk.cluster.forwarding import OtherInstances, build_failure_response
from gymsdk.cluster.reports import Instance
from gymsdk.cluster.shared_memory import SharedMemory
from gymsdk.edge.app import build_rejection
from gymsdk.edge.errors import CLIENT_CLOSED_REQUEST, RequestRejected
from gymsdk.edge.limits import KEEP_SECONDS
from gymsdk.edge.request import (
    FORWARDED_HEADER,
    App,
    Receive,
    Scope,
    Send,
    get_state,
    json_response,
    read_body,
    release_body,
)
from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.http.client import HttpResponse
from gymsdk.jsonl import dump_json
from gymsdk.types import Item

CLAIM_SECONDS = KEEP_SECONDS
"""How long a worker owns the id of a rollout after the end of the rollout, as long as it keeps the response."""

RENEWALS = 3
"""How often a worker renews a claim that it holds within the time after which the claim would expire."""

METRICS_SECONDS = 2.0
"""Seconds that another worker may take to return its metrics."""

PAUSE_PATHS = frozenset({"/pause", "/resume"})
"""The paths of a model server that concern all workers."""

MAX_PAUSE_BODY_BYTES = 64 * 1024
"""The maximum size of the body of a pause, which has two numbers."""

PAUSE_SECONDS = 3700.0
"""Seconds that another worker may take for a pause: the longest wait for running calls, and a margin."""


class Ownership:
    """Decides which worker answers the requests that name a rollout or a session by an id of the client.

    A repeated request may arrive on another connection, and thereby at another worker. The first worker that receives
    an id owns it, and the others forward its requests. If the owner has ended, one of the others takes the id over.

    Args:
        scope: A name for the kind of the ids, so that those of different servers differ.
        process: The id of this process.
        memory: The memory that the workers share.
        others: The instances of the server, those in the other workers among them.
        seconds: How long this worker owns an id after its last request, the last `hold` or the last `let_go`.
    """

    def __init__(
        self, scope: str, process: int, memory: SharedMemory, others: OtherInstances, *, seconds: float = CLAIM_SECONDS
    ) -> None:
        self._scope = scope
        self._process = process
        self._memory = memory
        self._others = others
        self._seconds = seconds
        self._users: Counter[str] = Counter()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def with_scope(self, scope: str, *, seconds: float) -> Ownership:
        """Return the ownership of other ids of the same server."""
        return Ownership(f"{self._scope}\0{scope}", self._process, self._memory, self._others, seconds=seconds)

    async def forward(self, request: Request, id: str, content: Item) -> Response | None:
        """Return the response of the worker that owns *id*, `None` if that is this worker, now or from now on.

        A request that this method has forwarded at another worker is not forwarded again. Its response is 503 if a
        third worker has become the owner meanwhile. A request that `ForwardingMiddleware` has forwarded because of its
        cookie, which may name a session of another worker than the id, is forwarded once more.

        Args:
            request: The request.
            id: The id that the request names.
            content: The body of the request.
        """
        mark = request.headers.get(FORWARDED_HEADER, "")
        is_forwarded = hmac.compare_digest(mark.encode("utf-8"), self._memory.secret.encode())
        ended = None
        while (owner := self._claim(id, take_from=ended)) != self._process:
            if self._memory.is_running(owner):
                response = None if is_forwarded else await self._send(request, content, owner)
                if response is not None:
                    return response
                if self._memory.is_running(owner):
                    return build_failure_response("the worker that has this id could not be reached; try again")
            # The owner has ended, and the rollout or session with it. Another worker may take the id over first.
            ended = owner
        return None

    def hold(self, id: str) -> None:
        """Keep the claim on *id* from expiring, until `let_go` has been called as often as this method."""
        self._users[id] += 1
        if self._users[id] == 1:
            self._schedule(id)

    def let_go(self, id: str, *, is_kept: bool) -> None:
        """End one use of *id*. After the last use, release the id, or renew its claim if *is_kept*."""
        self._users[id] -= 1
        if self._users[id]:
            return
        del self._users[id]
        self._timers.pop(id).cancel()
        if is_kept:
            self._claim(id)
        else:
            self._memory.release(self._get_key(id), self._process)

    def _schedule(self, id: str) -> None:
        self._timers[id] = asyncio.get_running_loop().call_later(self._seconds / RENEWALS, self._renew, id)

    def _renew(self, id: str) -> None:
        self._claim(id)
        self._schedule(id)

    def _claim(self, id: str, *, take_from: int | None = None) -> int:
        return self._memory.claim(self._get_key(id), self._process, self._seconds, take_from=take_from)

    async def _send(self, request: Request, content: Item, owner: int) -> Response | None:
        """Return the response of the worker *owner*, `None` if it did not get the request."""
        instance = await self._others.find_worker(owner)
        if instance is None:
            return None
        body, mark = dump_json(content), self._memory.secret
        try:
            response = await self._others.forward(request, body, instance.id, instance.url, mark=mark)
        except client.NotSent:
            return None
        get_state(request.scope).is_forwarded = True
        return response

    def _get_key(self, id: str) -> str:
        return f"{self._scope}\0{id}"


class WorkerMiddleware:
    """ASGI middleware that answers for all workers: `GET /metrics`, and the pause of a model.

    A request at the port of this worker alone concerns this worker alone.

    Args:
        app: The app.
        shared_port: The port that all workers share.
        others: The instances of the server, those in the other workers among them.
        render_metrics: Returns the metrics of this worker.
        can_pause: Whether the app is a model server.
        count: The number of workers.
    """

    def __init__(
        self,
        app: App,
        shared_port: int,
        others: OtherInstances,
        render_metrics: Callable[[], Awaitable[str]],
        *,
        can_pause: bool,
        count: int,
    ) -> None:
        self._app = app
        self._shared_port = shared_port
        self._others = others
        self._render_metrics = render_metrics
        self._can_pause = can_pause
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request for all workers, or pass it on."""
        if scope["type"] != "http" or not self._is_for_all(scope):
            await self._app(scope, receive, send)
        elif scope["path"] == "/metrics":
            response: Response = PlainTextResponse(
                await self._collect_metrics(), media_type="text/plain; version=0.0.4"
            )
            await response(scope, receive, send)
        else:
            response = await self._answer_pause(Request(scope, receive))
            await response(scope, receive, send)

    def _is_for_all(self, scope: Scope) -> bool:
        path, method = scope["path"], scope["method"]
        if path != "/metrics" and not (self._can_pause and path in PAUSE_PATHS):
            return False
        is_shared = (scope.get("server") or ("", 0))[1] == self._shared_port
        return is_shared and method in ({"GET"} if path == "/metrics" else {"GET", "POST"})

    async def _collect_metrics(self) -> str:
        """Return the metrics of all workers that answer; each has the label `worker`."""
        own = self._others.instance
        others = [instance for instance in await self._others.list_workers() if instance.id != own]
        texts = await asyncio.gather(*map(self._fetch_metrics, others))
        return merge_metrics([await self._render_metrics(), *texts])

    async def _fetch_metrics(self, instance: Instance) -> str:
        headers = credentials.resolve_auth_headers(self._others.token)
        try:
            answer = await client.get(
                instance.url + "/metrics", headers=headers, timeout=METRICS_SECONDS, retry=client.NO_RETRY
            )
        except Failed:
            # The metric `server_up` of the head tells that the worker does not answer.
            return ""
        return answer.text if answer.ok else ""

    async def _answer_pause(self, request: Request) -> Response:
        """Return the response to a pause. The middleware is outside the application and handles exceptions itself."""
        try:
            return await self._pause_all(request)
        except RequestRejected as rejected:
            return build_rejection(rejected)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        finally:
            release_body(get_state(request.scope))

    async def _pause_all(self, request: Request) -> Response:
        """Send the request to all workers, and return their states as one; the first error if a worker has one."""
        get_state(request.scope).max_body = MAX_PAUSE_BODY_BYTES
        body = await read_body(request)
        workers = await self._others.list_workers()
        results = await asyncio.gather(*(self._send(instance, request, body) for instance in workers))
        # The head may still list a worker that has ended. Its successor reads the pause from the shared memory.
        answers = [result for result in results if not isinstance(result, client.NotSent)]
        is_pause = request.method == "POST" and request.url.path == "/pause"
        if not answers or (is_pause and len(answers) < self._count):
            # A worker that has not answered may have calls at the engine.
            reached = f"{len(answers)} of {self._count} workers could be reached; send the request again"
            return build_failure_response(reached)
        for answer in answers:
            if isinstance(answer, Failed):
                return build_failure_response(f"a worker did not answer, so send the request again: {answer}")
            if not answer.ok:
                headers = {key: value for key, value in answer.headers.items() if key.lower() == "retry-after"}
                return Response(answer.body, answer.status, headers, media_type="application/json")
        reports = [answer for answer in answers if isinstance(answer, HttpResponse)]
        # 202 if a worker still has calls at the engine.
        status = max(report.status for report in reports)
        return json_response(merge_pause_states([report.json() for report in reports]), status=status)

    async def _send(self, instance: Instance, request: Request, body: bytes) -> HttpResponse | Failed:
        headers: client.Headers = {FORWARDED_HEADER: "1", **credentials.resolve_auth_headers(self._others.token)}
        url = instance.url + request.url.path + (f"?{request.url.query}" if request.url.query else "")
        try:
            if request.method == "GET":
                return await client.get(url, headers=headers, timeout=METRICS_SECONDS, retry=client.NO_RETRY)
            return await client.post(
                url, body or b"{}", headers=headers, timeout=PAUSE_SECONDS, retry=client.NO_RETRY, once=True
            )
        except Failed as error:
            return error


def merge_metrics(texts: Iterable[str]) -> str:
    """Merge metrics in the Prometheus text format: each metric is described once, followed by all of its samples."""
    descriptions: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for text in texts:
        name = ""
        for line in text.splitlines():
            if not line.startswith("#"):
                samples[name].append(line)
                continue
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                samples.setdefault(name, [])
            if line not in descriptions.setdefault(name, []):
                descriptions[name].append(line)
    return "".join(f"{line}\n" for name in samples for line in (*descriptions[name], *samples[name]))


def merge_pause_states(states: Sequence[Item]) -> Item:
    """Return the states of a model in all workers as one: paused if all are, with the sums of their calls."""
    counts = {key: sum(state[key] for state in states) for key in ("running", "waiting", "cut", "in_flight")}
    ages = [state["oldest_seconds"] for state in states if state["oldest_seconds"] is not None]
    return {"paused": all(state["paused"] for state in states), **counts, "oldest_seconds": max(ages, default=None)}
