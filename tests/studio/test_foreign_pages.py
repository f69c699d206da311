"""Pages of other origins in a real browser: no server answers them, and nothing is written, played or paused."""

from __future__ import annotations

import json
import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from .conftest import start_viewer

pytestmark = pytest.mark.browser

PAGE = Path(__file__).with_name("foreign_page.html").read_text()

ATTACKS = re.findall(r'^  "([^"]+)": \(url', PAGE, re.MULTILINE)
"""The ways in which the page sends a request."""

PLACES = ("another port", "another port of another name", "another name for 127.0.0.1")
"""The origins of the pages that send requests."""

QUICK = {
    "another port": {"fetch, Blob", "fetch, ArrayBuffer", "sendBeacon, Blob", "form, text/plain", "image", "WebSocket"},
    "another port of another name": {"fetch, Blob"},
    "another name for 127.0.0.1": {"fetch, Blob"},
}
"""One way of each kind from one place, and one way from each other place; the others belong to the long set."""

TABLE = os.environ.get("GYMSDK_FOREIGN_PAGES")
"""The file to which the statuses are added; without it, none are written."""


class Site(BaseHTTPRequestHandler):
    """A page of another site."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture(scope="module")
def site() -> Iterator[int]:
    """Return the port of another site."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


class Recorder(socketserver.ThreadingTCPServer):
    """Forwards connections to a server, as `ssh -L` does, and records path and status of each response."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, target: str) -> None:
        super().__init__(("127.0.0.1", 0), Forwarding)
        self.target = urlsplit(target).port or 0
        self.port: int = self.server_address[1]
        self.responses: list[tuple[str, int]] = []


class Forwarding(socketserver.BaseRequestHandler):
    """One forwarded connection."""

    server: Recorder

    def setup(self) -> None:
        self.paths: list[str] = []
        self.answered = 0

    def handle(self) -> None:
        if self.request.recv(100, socket.MSG_PEEK).startswith(b"GET /foreign-page"):
            # Another program on the same port, in the name of `localhost`.
            self.request.recv(65_536)
            self.request.sendall(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n" + PAGE.encode()
            )
            return
        with socket.create_connection(("127.0.0.1", self.server.target)) as upstream:
            forward = threading.Thread(target=self.copy, args=(self.request, upstream, self.read_requests))
            forward.start()
            self.copy(upstream, self.request, self.read_responses)
            forward.join()

    def read_requests(self, data: bytes) -> None:
        self.paths += [path.decode() for path in re.findall(rb"[A-Z]+ (/[^ ?]*)\S* HTTP/1\.1\r\n", data)]

    def read_responses(self, data: bytes) -> None:
        for status in re.findall(rb"HTTP/1\.1 (\d\d\d) ", data):
            self.server.responses.append((self.paths[self.answered], int(status)))
            self.answered += 1

    @staticmethod
    def copy(source: socket.socket, sink: socket.socket, read: Callable[[bytes], None]) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                read(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def record(target: str) -> Iterator[Recorder]:
    with Recorder(target) as recorder:
        threading.Thread(target=recorder.serve_forever, daemon=True).start()
        yield recorder
        recorder.shutdown()


@dataclass(frozen=True)
class Door:
    """A request that changes something, and how to see whether it did."""

    path: str
    body: dict[str, Any]
    count_changes: Callable[[], int]


ROW = {"responses_create_params": {"input": [{"role": "user", "content": "1"}]}, "expected_answer": "1", "answer": "1"}


@pytest.fixture(scope="module")
def doors(weak: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Recorder, Door]]]:
    """Return the viewer with `--play`, and a served environment without a token, behind recorders."""
    folder = tmp_path_factory.mktemp("doors")
    command = [sys.executable, "-m", "gymsdk", "serve", "math", "--json", "--port", "0"]
    with (
        ExitStack() as stack,
        start_viewer(weak, cache=folder / "cache", cwd=folder, options=["--play"]) as viewer,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as serving,
    ):
        assert serving.stdout is not None
        urls = find_urls(json.loads(serving.stdout.readline()))
        model, agent = urls["policy_model"], urls["math_simple_agent"]

        def count_files(pattern: str, root: Path) -> int:
            return len([*root.rglob(pattern)])

        def count_runs() -> int:
            metrics = httpx.get(f"{agent}/metrics").text
            lines = re.findall(r'_requests_total\{[^}]*route="/run"[^}]*\} (\S+)', metrics)
            return round(sum(map(float, lines)))

        found = {
            "viewer, note": (
                viewer.base,
                Door("/api/runs/weak/notes", {"id": "0:0", "tags": ["x"]}, partial(count_files, "notes.jsonl", weak)),
            ),
            "viewer, play": (
                viewer.base,
                Door(
                    "/api/runs/weak/rollouts/0:0/branch",
                    {"turn": 0, "then": "scripted/null"},
                    partial(count_files, "rollouts.jsonl", folder),
                ),
            ),
            "model server, pause": (
                model,
                Door("/pause", {}, lambda: int(httpx.get(f"{model}/pause").json()["paused"])),
            ),
            "agent, run": (agent, Door("/run", ROW, count_runs)),
        }
        yield {name: (stack.enter_context(record(base)), door) for name, (base, door) in found.items()}
        serving.terminate()


def find_urls(ready: Any) -> dict[str, str]:
    """Return the URLs of the servers by name, from the line that `gymsdk serve --json` prints."""
    return {name: server["url"] for name, server in ready["servers"].items()}


@pytest.mark.parametrize(
    ("place", "attack"),
    [
        pytest.param(place, attack, marks=() if attack in QUICK[place] else pytest.mark.slow)
        for place in PLACES
        for attack in ATTACKS
    ],
)
def test_a_page_of_another_origin_changes_nothing(
    chromium: Any, site: int, doors: dict[str, tuple[Recorder, Door]], place: str, attack: str
) -> None:
    context = chromium.new_context()
    page = context.new_page()
    for name, (recorder, door) in doors.items():
        origin = {
            "another port": f"http://127.0.0.1:{site}",
            "another port of another name": f"http://localhost:{site}",
            "another name for 127.0.0.1": f"http://localhost:{recorder.port}",
        }[place]
        page.goto(f"{origin}/foreign-page")
        before, recorder.responses[:] = door.count_changes(), []
        url = f"http://127.0.0.1:{recorder.port}{door.path}"
        page.evaluate("attack", [attack, url, json.dumps(door.body)])
        for _ in range(100):
            # Tabs ask for the icon of a site by themselves.
            if statuses := {status for path, status in recorder.responses if path == door.path}:
                break
            page.wait_for_timeout(20)
        if TABLE:
            with Path(TABLE).open("a") as table:
                table.write(f"{name:20} | {place:28} | {attack:24} | {sorted(statuses)}\n")
        assert statuses == {403}, name
        assert door.count_changes() == before, name
    context.close()


def test_the_servers_answer_their_own_pages(chromium: Any, doors: dict[str, tuple[Recorder, Door]]) -> None:
    context = chromium.new_context()
    page = context.new_page()
    recorder, door = doors["agent, run"]
    page.goto(f"http://127.0.0.1:{recorder.port}/livez")
    before = door.count_changes()
    page.evaluate(
        """([path, body]) => fetch(path, {method: "POST", body, headers: {"Content-Type": "application/json"}})""",
        [door.path, json.dumps(door.body)],
    )
    assert door.count_changes() == before + 1
    context.close()
