"""A folder to run the page's commands in, with free ports, loopback addresses and a local model server."""

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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from gymsdk import load

PORTS = re.compile(r"(?<![\d.])(11000|10240|8080|8000)\b")
ADDRESSES = {"192.168.1.100": "127.0.0.2", "192.168.1.101": "127.0.0.3", "coordinator:": "127.0.0.2:"}
KEY = "policy_api_key: sk-your-openai-key\n"
WITHOUT_RAY = pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed, and is used")
COMMANDS = Path(sys.executable).parent
"""The folder of the console scripts of this installation."""


@dataclass(frozen=True)
class Result:
    """The result of a command."""

    code: int
    out: str
    err: str


@dataclass
class Server:
    """A running command that serves: its output until it was ready, and its error output."""

    process: subprocess.Popen[str]
    out: str = ""
    err: list[str] = field(default_factory=list)

    def url(self, name: str) -> str:
        """Return the URL that the output gives for a server."""
        return next(line.split()[1] for line in self.out.splitlines() if line.split()[:1] == [name])


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


class Workspace:
    """A folder, with the model server *engine* in place of the ones that the page names."""

    def __init__(self, folder: Path, engine: str = "http://127.0.0.1:9/v1") -> None:
        self.folder = folder
        self.engine = engine
        self.ports: dict[str, int] = defaultdict(find_free_port)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("GYMSDK_", "RAY_"))}
        self.variables = inherited | {"PATH": f"{COMMANDS}:{os.environ['PATH']}", "HOME": str(folder)}

    @property
    def head(self) -> str:
        """The URL of the head at the default port."""
        return f"http://127.0.0.1:{self.ports['11000']}"

    def localize(self, text: str) -> str:
        """Return *text* with local ports and addresses in place of the page's."""
        text = text.replace("http://your-vllm-server:10240", self.engine.removesuffix("/v1"))
        text = text.replace("http://127.0.0.1:8000/v1", self.engine)
        for address, local in ADDRESSES.items():
            text = text.replace(address, local)
        return PORTS.sub(lambda probe: str(self.ports[probe[1]]), text)

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.localize(text))
        path.chmod(0o600)
        return path

    def run(self, command: str, **variables: str) -> Result:
        """Run *command* to its end and return its result."""
        completed = subprocess.run(
            ["bash", "-c", self.localize(command)],
            cwd=self.folder,
            env=self.variables | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return Result(completed.returncode, completed.stdout, completed.stderr)

    @contextlib.contextmanager
    def serve(self, command: str, **variables: str) -> Iterator[Server]:
        """Run *command* as a server; stop it with SIGINT and check that it exits with 0."""
        process = subprocess.Popen(
            ["bash", "-c", re.sub(r"(?:^|(?<=\n))(?=ng_run |gymsdk )", "exec ", self.localize(command))],
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
        reader = threading.Thread(target=lambda: server.err.extend(process.stderr or ()))
        reader.start()
        try:
            for line in process.stdout:
                server.out += line
                if line.startswith("Ready"):
                    break
            else:
                reader.join(20)
                raise AssertionError("".join(server.err))
            yield server
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()
            reader.join(20)
            process.stdout.close()
            process.stderr.close()

    def with_head_port(self, command: str) -> str:
        """Return *command* with a free port for the head, because the default port may be in use."""
        port = self.ports["11000"]
        if "head_server" in command or "--port" in command or "--head" in command:
            return command
        return f"{command} +head_server.port={port}" if command.startswith("ng_") else f"{command} --port {port}"


def write_rows(workspace: Workspace, environment: str, count: int = 4, name: str = "rows.jsonl") -> None:
    """Write *count* rows of *environment* that name no agent."""
    tasks = load(environment).tasks("train", seed=0)
    lines = [json.dumps(task.row()) for _, task in zip(range(count), tasks, strict=False)]
    (workspace.folder / name).write_text("\n".join(lines) + "\n")


def fetch_config(head: str) -> dict[str, Any]:
    """Return the configuration that the head serves."""
    fetch_config: dict[str, Any] = yaml.safe_load(httpx.get(f"{head}/global_config_dict_yaml").json())
    return fetch_config
