"""The process of the servers of a training run: `python -m gymsdk_nemo_compat.child`, started by `ServerRun`.

It reads the deployment from standard input and writes one line of JSON to standard output: the addresses once all
servers are ready, or `error` and `usage` (whether the deployment is wrong) if they cannot start.
"""

from __future__ import annotations

import json
import sys

import typer

from gymsdk.cli.deployment import serve_until_stopped
from gymsdk.cli.process import limit_exit_time
from gymsdk.cli.ray import choose_cluster
from gymsdk.cli.serve import Announcer
from gymsdk.config.model import Deployment
from gymsdk.deploy import process_guard
from gymsdk.deploy.child import read_config_line
from gymsdk.errors import GymsdkError, UsageError


def main() -> None:
    """Serve until SIGTERM, or until the process that started this one ends."""
    deployment = Deployment.model_validate(json.loads(read_config_line()))
    if not process_guard.IS_AVAILABLE:
        process_guard.watch_parent()
    announcer = Announcer(json=True, tries=False)
    try:
        # A trainer that wants a cluster names it; an own one would take seconds to start.
        serve_until_stopped(choose_cluster(deployment, has_files=False).deployment, announcer)
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
