"""Play weather rollouts with NeMo Gym against the stub model server: two model calls and one tool call each.

usage: nemo_gym_peer.py STUB_URL ROLLOUTS IN_FLIGHT      run with a Python that has nemo-gym installed

The servers are those of NeMo Gym's wheel: example_single_tool_call, simple_agent and openai_model. Each is a process
that reads the variables with which NeMo Gym starts it. The load is posted to `/run` of the agent. The script prints the
CPU time of the servers per rollout in milliseconds, the number of scored rollouts and the version of NeMo Gym as a line
of JSON, after a warm-up.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from yardstick.client import post_rows
from yardstick.processes import ProcessTree, stop_process
from yardstick.rows import build_rows

START_SECONDS = 120
RESOURCES, AGENT, MODEL = "example_single_tool_call", "weather_agent", "policy_model"


def build_config(stub: str) -> dict[str, Any]:
    """Return the configuration of all servers, with free ports."""
    model = {"openai_base_url": f"{stub}/v1", "openai_api_key": "none", "openai_model": "stub"}
    agent = {
        "resources_server": {"type": "resources_servers", "name": RESOURCES},
        "model_server": {"type": "responses_api_models", "name": MODEL},
    }
    servers = [
        (RESOURCES, "resources_servers", RESOURCES, {"domain": "agent"}),
        (MODEL, "responses_api_models", "openai_model", model),
        (AGENT, "responses_api_agents", "simple_agent", agent),
    ]
    address = {"host": "127.0.0.1", "entrypoint": "app.py"}
    with ExitStack() as stack:
        ports = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in (*servers, None)]
    config: dict[str, Any] = {
        name: {kind: {program: {**address, "port": port, **settings}}}
        for (name, kind, program, settings), port in zip(servers, ports, strict=False)
    }
    return config | {"head_server": {"host": "127.0.0.1", "port": ports[-1]}, "dry_run": False}


@contextmanager
def run_server(name: str, config: dict[str, Any], log: Path) -> Iterator[tuple[ProcessTree, str]]:
    """Run the server *name* until the context ends, and yield its processes and its URL when it accepts connections."""
    [(kind, programs)] = config[name].items()
    [(program, settings)] = programs.items()
    spec = find_spec(f"{kind}.{program}")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"this installation of NeMo Gym has no {kind}/{program}")
    folder = Path(next(iter(spec.submodule_search_locations)))
    # NeMo Gym gives each server the configuration as YAML, which JSON is, and the name of its part.
    environ = {**os.environ, "NEMO_GYM_CONFIG_DICT": json.dumps(config), "NEMO_GYM_CONFIG_PATH": name}
    command = [sys.executable, str(folder / settings["entrypoint"])]
    with (
        log.open("wb") as file,
        subprocess.Popen(command, cwd=folder, env=environ, stdout=file, stderr=file) as process,
    ):
        try:
            deadline = time.monotonic() + START_SECONDS
            address = settings["host"], settings["port"]
            while True:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{name} did not start: {log.read_text()[-2000:]}")
                try:
                    socket.create_connection(address).close()
                    break
                except ConnectionRefusedError:
                    time.sleep(0.2)
            yield ProcessTree(process.pid), f"http://{address[0]}:{address[1]}"
        finally:
            stop_process(process)


def main(stub: str, rollouts: int, in_flight: int) -> None:
    """Print the measurement."""
    config, rows = build_config(stub), build_rows("tool_call", rollouts)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {
            name: stack.enter_context(run_server(name, config, folder / name)) for name in (RESOURCES, MODEL, AGENT)
        }
        _, url = servers[AGENT]
        warm_up = post_rows(url, rows[:in_flight], in_flight)
        if not warm_up.answered:
            raise RuntimeError(f"{dict(warm_up.failed)}: {(folder / AGENT).read_text()[-2000:]}")
        before = sum(tree.read_cpu() for tree, _ in servers.values())
        outcome = post_rows(url, rows, in_flight)
        cpu = sum(tree.read_cpu() for tree, _ in servers.values()) - before
    scored = outcome.answered - outcome.wrong
    print(json.dumps({"cpu": 1e3 * cpu / rollouts, "scored": scored, "version": version("nemo-gym")}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
