"""Request /livez from servers at short intervals, from a process of its own, and print the latencies in seconds.

usage: python health.py URL...

Each request uses a new connection, as a load balancer's health check does. The script stops when standard input ends.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

INTERVAL_SECONDS = 0.1
"""Seconds between two requests to the same server."""

TIMEOUT_SECONDS = 60


def request_repeatedly(url: str, stopped: threading.Event) -> None:
    """Request /livez from one server until *stopped*; print the latencies, infinity for a request that fails."""
    address = urlsplit(url)
    request = f"GET /livez HTTP/1.1\r\nhost: {address.netloc}\r\nconnection: close\r\n\r\n".encode()
    while not stopped.is_set():
        started = time.perf_counter()
        try:
            with socket.create_connection((address.hostname, address.port), timeout=TIMEOUT_SECONDS) as connection:
                connection.sendall(request)
                succeeded = connection.recv(4096).startswith(b"HTTP/1.1 200")
        except OSError:
            succeeded = False
        latency = time.perf_counter() - started if succeeded else float("inf")
        sys.stdout.write(f"{latency}\n")
        stopped.wait(max(0.0, INTERVAL_SECONDS - latency))


@contextmanager
def probe_health(urls: Sequence[str]) -> Iterator[list[float]]:
    """Request /livez from *urls* while the context is open; the list has the latencies in seconds when it has ended."""
    latencies: list[float] = []
    with subprocess.Popen(
        [sys.executable, __file__, *urls], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield latencies
        output, _ = process.communicate()
        latencies += map(float, output.split())


def main(urls: Sequence[str]) -> None:
    """Probe until standard input ends."""
    stopped = threading.Event()
    threads = [threading.Thread(target=request_repeatedly, args=(url, stopped)) for url in urls]
    for thread in threads:
        thread.start()
    sys.stdin.read()
    stopped.set()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
