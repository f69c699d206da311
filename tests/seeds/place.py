"""A place: a folder in which commands are typed, with other ports, addresses of the loopback, a policy for a model."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from gymsdk import load

PORTS = re.compile(r"(?<![\d.])(11000|10240|8080|8000)\b")
ADDRESSES = {"192.168.1.100": "127.0.0.2", "192.168.1.101": "127.0.0.3", "coordinator:": "127.0.0.2:"}
KEY = "policy_api_key: sk-your-openai-key\n"
COMMANDS = Path(sys.executable).parent
"""Where the console scripts are: an installation without them has not been made anew."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


@dataclass
class Server:
    """A command that serves: what it said until it was ready, and what it has said of trouble."""

    process: subprocess.Popen[str]
    said: str = ""
    err: list[str] = field(default_factory=list)

    def url(self, name: str) -> str:
        """Give the URL that it told of a server."""
        return next(line.split()[1] for line in self.said.splitlines() if line.split()[:1] == [name])


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


class Place:
    """A folder, and the model server *engine* in place of any that is named."""

    def __init__(self, folder: Path, engine: str = "http://127.0.0.1:9/v1") -> None:
        self.folder = folder
        self.engine = engine
        self.ports: dict[str, int] = defaultdict(free)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("GYMSDK_", "RAY_"))}
        self.variables = kept | {"PATH": f"{COMMANDS}:{os.environ['PATH']}", "HOME": str(folder)}

    @property
    def head(self) -> str:
        """The head where nothing else is said of it."""
        return f"http://127.0.0.1:{self.ports['11000']}"

    def here(self, text: str) -> str:
        """Give *text* with what is somewhere else in it."""
        text = text.replace("http://your-vllm-server:10240", self.engine.removesuffix("/v1"))
        text = text.replace("http://127.0.0.1:8000/v1", self.engine)
        for theirs, here in ADDRESSES.items():
            text = text.replace(theirs, here)
        return PORTS.sub(lambda found: str(self.ports[found[1]]), text)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.here(text))
        path.chmod(0o600)
        return path

    def run(self, command: str, **variables: str) -> Ended:
        """Give how *command* ends, which does so by itself."""
        done = subprocess.run(
            ["bash", "-c", self.here(command)],
            cwd=self.folder,
            env=self.variables | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    @contextlib.contextmanager
    def serving(self, command: str, **variables: str) -> Iterator[Server]:
        """Have *command* serve; it is stopped as Ctrl-C does it, and has to end well."""
        process = subprocess.Popen(
            ["bash", "-c", re.sub(r"(?:^|(?<=\n))(?=ng_run |gymsdk )", "exec ", self.here(command))],
            cwd=self.folder,
            env=self.variables | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        server = Server(process)
        assert process.stdout is not None
        assert process.stderr is not None
        listening = threading.Thread(target=lambda: server.err.extend(process.stderr or ()))
        listening.start()
        try:
            for line in process.stdout:
                server.said += line
                if line.startswith("Ready"):
                    break
            else:
                listening.join(20)
                raise AssertionError("".join(server.err))
            yield server
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            listening.join(20)
            process.stdout.close()
            process.stderr.close()

    def at_head(self, command: str) -> str:
        """Give *command* with the head at a port that is free: the usual one is somebody's."""
        port = self.ports["11000"]
        if "head_server" in command or "--port" in command or "--head" in command:
            return command
        return f"{command} +head_server.port={port}" if command.startswith("ng_") else f"{command} --port {port}"


def rows(place: Place, environment: str, count: int = 4, name: str = "rows.jsonl") -> None:
    """Write *count* rows of *environment* which name no agent."""
    tasks = load(environment).tasks("train", seed=0)
    lines = [json.dumps(task.row()) for _, task in zip(range(count), tasks, strict=False)]
    (place.folder / name).write_text("\n".join(lines) + "\n")


def config(head: str) -> dict[str, Any]:
    """Give what the head tells."""
    found: dict[str, Any] = yaml.safe_load(httpx.get(f"{head}/global_config_dict_yaml").json())
    return found
