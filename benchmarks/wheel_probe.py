"""Start servers of NeMo Gym's wheel one after the other, and report which of them answer.

usage: PYTHON wheel_probe.py < SERVERS

PYTHON is the interpreter of the environment with the wheel. Each line of SERVERS is a JSON object with `app`, `name`
and `config`; for each, the script writes the last error in the output of the server, or `null` if the server answers.
Each server is a fork of this process, which has imported what all of them import, so that a start takes half a second.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import nemo_gym.base_resources_server  # type: ignore[import-not-found]  # NeMo Gym's wheel, in its own environment
import nemo_gym.server_utils  # noqa: F401 - imported for the forks

PROBE_SECONDS = 25.0


def become(server: dict[str, Any], port: int, output: IO[bytes]) -> None:
    """Run the program of *server* in this process, as gymsdk runs it."""
    app = Path(server["app"])
    os.setsid()
    os.chdir(app.parent)
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    sys.path.insert(0, str(app.parent))
    for block in server["config"][server["name"]]["resources_servers"].values():
        block |= {"host": "127.0.0.1", "port": port}
    os.environ |= {"NEMO_GYM_CONFIG_DICT": json.dumps(server["config"]), "NEMO_GYM_CONFIG_PATH": server["name"]}
    # An error ends this process with a traceback, as it ends the program.
    runpy.run_path(str(app), run_name="__main__")
    os._exit(0)


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def probe(server: dict[str, Any]) -> str | None:
    """Return the last line of the output of *server*, `None` if it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            become(server, port, output)
        deadline = time.monotonic() + PROBE_SECONDS
        while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
            if answers(port):
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                return None
            time.sleep(0.05)
        if time.monotonic() >= deadline:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return "no answer"
        output.seek(0)
        lines = [line for line in output.read().decode(errors="replace").splitlines() if line[:1].strip()]
        errors = [line for line in lines if "Error: " in line.split("'")[0]]
        return (errors or lines or ["no output"])[-1]


def main() -> None:
    for line in sys.stdin:
        sys.stdout.write(json.dumps(probe(json.loads(line))) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
