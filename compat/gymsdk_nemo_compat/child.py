"""The process of the servers of a training run: `python -m gymsdk_nemo_compat.child`, started by `ServerRun`.

It reads the deployment from standard input and writes one line of JSON to standard output: the addresses once all
servers are ready, or `error` and `usage` (whether the deployment is wrong) if they cannot start.
"""

from __future__ import annotations

import json
import socket
import sys

import typer

from gymsdk.cli.deployment import serve_until_stopped
from gymsdk.cli.output import reserve_stdout
from gymsdk.cli.process import limit_exit_time
from gymsdk.cli.ray import choose_cluster
from gymsdk.cli.serve import Announcer
from gymsdk.config.model import Deployment
from gymsdk.deploy import process_guard
from gymsdk.deploy.child import HEAD_SERVER, read_config_line
from gymsdk.edge.addresses import bind_socket
from gymsdk.errors import GymsdkError, UsageError


def bind_head(deployment: Deployment) -> dict[str, socket.socket]:
    """Return the socket of the head; without it, a run whose port is in use would join the head of another run.

    Raises:
        UsageError: The port is in use, or the host is not an address of this machine.
    """
    host, port = deployment.head_address
    return {HEAD_SERVER: bind_socket(host, port, what="the head")}


def main() -> None:
    """Serve until SIGTERM, or until the process that started this one ends."""
    deployment = Deployment.model_validate(json.loads(read_config_line()))
    if not process_guard.IS_AVAILABLE:
        process_guard.watch_parent()
    announcer = Announcer(json=True, tries=False)
    try:
        # A trainer that wants a cluster names it; an own one would take seconds to start.
        chosen = choose_cluster(deployment, has_files=False).deployment
        with reserve_stdout():
            serve_until_stopped(chosen, announcer, sockets=bind_head(deployment), quiet=True)
        code = 0
    except GymsdkError as error:
        report = {"error": str(error), "usage": isinstance(error, UsageError)}
        sys.stdout.write(f"{json.dumps(report)}\n")
        sys.stderr.write(f"Error: {error}\n")
        code = 1
    except typer.Exit as stopped:
        code = stopped.exit_code
    sys.stdout.flush()
    limit_exit_time(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
