"""Measure what the parts of the edge save that a library has, too: with the part and with the library, in turn.

usage: edge.py [PART...] [--rounds N]

The CPU time per operation is the least of the rounds, because other processes of a machine only add to it; in each
round all variants run one after the other. A server runs in a process of its own, and only its CPU time counts; the
other parts are measured in this process. The parts:

- routing: a POST request to an endpoint of `ServerApp.add_post`, and to one of FastAPI.
- connection: a POST request over `edge.listener.Connection` and over uvicorn's own protocol.
- client: a POST request over `http.connections` and over aiohttp.
- pacing: the longest time to the answer of `/livez` while 1,024 POST requests of 1 ms of CPU time arrive at once, with
  and without the pacer. (Not CPU time.)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import uvicorn
from fastapi import Request, Response

from gymsdk.concurrency import run_event_loop
from gymsdk.edge.addresses import bind_socket
from gymsdk.edge.app import create_app
from gymsdk.edge.limits import Pacer
from gymsdk.edge.listener import Listener
from gymsdk.edge.request import json_response, read_json_object
from gymsdk.http import client, connections
from gymsdk.observability.metrics import ServerMetrics

BODY = json.dumps({"input": [{"role": "user", "content": "x" * 500}]}).encode()
IN_FLIGHT, REQUESTS = 32, 3000
BURST, BUSY_SECONDS = 1024, 0.001


async def answer(request: Request) -> Response:
    """Parse the body and answer."""
    return json_response({"items": len(await read_json_object(request))})


async def work(_: Request) -> Response:
    """Use CPU time and answer."""
    until = time.thread_time() + BUSY_SECONDS
    while time.thread_time() < until:
        pass
    return json_response({})


async def report_cpu(_: Request) -> Response:
    """Answer with the CPU time of this process."""
    return json_response({"cpu": time.process_time()})


async def serve(variant: str) -> None:
    """Serve a variant at a free port until the process is killed, and print the port."""
    app = create_app("edge", "Answers requests.", metrics=ServerMetrics("edge"))
    if variant == "fastapi":
        app.add_api_route("/answer", answer, methods=["POST"])
    else:
        app.add_post("/answer", answer)
    app.add_post("/work", work)
    app.add_post("/cpu", report_cpu)
    sock = bind_socket("127.0.0.1", 0)
    print(sock.getsockname()[1], flush=True)
    if variant == "uvicorn":
        config = uvicorn.Config(
            app, http="httptools", ws="none", log_config=None, access_log=False, server_header=False
        )
        await uvicorn.Server(config).serve([sock])
        return
    if variant == "unpaced":
        Pacer.may_start = lambda _: True  # type: ignore[method-assign, assignment]
    await Listener(app, sock, grace=1.0).run(asyncio.Event(), asyncio.Event())


@contextmanager
def run_server(variant: str) -> Iterator[int]:
    """Run a server in a process of its own, and yield its port."""
    command = [sys.executable, __file__, "--serve", variant]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None, "a pipe was asked for"
            yield int(process.stdout.readline())
        finally:
            process.kill()


async def post(port: int, path: str, count: int, in_flight: int) -> list[bytes]:
    """Send *count* requests over *in_flight* connections, and return the answers."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    message, answers, left = f"{head}Content-Length: {len(BODY)}\r\n\r\n".encode() + BODY, [], iter(range(count))

    async def send() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(message)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200"), head
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            answers.append(await reader.readexactly(int(length.partition(b":")[2])))
        writer.close()

    await asyncio.gather(*(send() for _ in range(in_flight)))
    return answers


async def measure_server(port: int) -> float:
    """Return the CPU time of one request in µs."""

    async def read_cpu() -> float:
        return float(json.loads((await post(port, "/cpu", 1, 1))[0])["cpu"])

    before = await read_cpu()
    await post(port, "/answer", REQUESTS, IN_FLIGHT)
    return (await read_cpu() - before) / REQUESTS * 1e6


async def measure_wait(port: int) -> float:
    """Return the longest time to an answer of `/livez` in ms, while requests that use CPU time arrive at once."""
    longest, sending = 0.0, asyncio.ensure_future(post(port, "/work", BURST, BURST))
    while not sending.done():
        began = time.perf_counter()
        await client.get(f"http://127.0.0.1:{port}/livez", retry=client.NO_RETRY)
        longest = max(longest, time.perf_counter() - began)
        await asyncio.sleep(0.01)
    await sending
    await client.aclose()
    return longest * 1e3


async def measure_client(port: int, *, with_aiohttp: bool) -> float:
    """Return the CPU time of one request of the client in µs."""
    left, url = iter(range(REQUESTS)), f"http://127.0.0.1:{port}/answer"

    async def send() -> None:
        for _ in left:
            assert (await client.post(url, {"input": "x" * 500}, retry=client.NO_RETRY)).ok

    with patch.object(connections, "parse_target", lambda _: None) if with_aiohttp else nullcontext():
        began = time.process_time()
        await asyncio.gather(*(send() for _ in range(IN_FLIGHT)))
        took = time.process_time() - began
    await client.aclose()
    return took / REQUESTS * 1e6


Measure = Callable[[], Awaitable[float]]


async def print_part(part: str, unit: str, variants: dict[str, Measure], rounds: int) -> None:
    """Measure the variants in turn, and print their least values and the ratios to the first one."""
    values: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name, measure in variants.items():
            value = await measure()
            # The first round warms up.
            if number:
                values[name].append(value)
    first = min(next(iter(values.values())))
    for name, found in values.items():
        print(f"{part:10} {name:12} {min(found):9.2f} {unit}  {min(found) / first:5.2f} x", flush=True)


SERVERS = {
    "routing": {"ServerApp": "listener", "FastAPI": "fastapi"},
    "connection": {"Connection": "listener", "uvicorn": "uvicorn"},
    "pacing": {"Pacer": "listener", "without": "unpaced"},
}
"""The servers of a part, by their name in the output."""


async def measure_part(part: str, rounds: int) -> None:
    """Measure one part, and print the figures."""
    with ExitStack() as stack:
        if part in SERVERS:
            measure, unit = (measure_wait, "ms") if part == "pacing" else (measure_server, "µs")
            ports = {name: stack.enter_context(run_server(variant)) for name, variant in SERVERS[part].items()}
            await print_part(part, unit, {name: partial(measure, port) for name, port in ports.items()}, rounds)
        else:
            port = stack.enter_context(run_server("listener"))
            own, aiohttp = (partial(measure_client, port, with_aiohttp=with_aiohttp) for with_aiohttp in (False, True))
            await print_part(part, "µs", {"connections": own, "aiohttp": aiohttp}, rounds)


PARTS = (*SERVERS, "client")


def main() -> None:
    """Measure the parts that the arguments name, by default all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        run_event_loop(serve(arguments.serve))
        return
    for part in arguments.parts or PARTS:
        run_event_loop(measure_part(part, arguments.rounds))


if __name__ == "__main__":
    main()
