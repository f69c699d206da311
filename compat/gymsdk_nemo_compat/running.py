"""Run the servers of a training run in a process of their own, and find them again in this process."""

from __future__ import annotations

import asyncio
import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from gymsdk import credentials
from gymsdk.client import ServerClient
from gymsdk.cluster.reports import build_url
from gymsdk.config.model import Deployment
from gymsdk.deploy import preflight, process_guard
from gymsdk.deploy.supervisor import describe_exit
from gymsdk.edge.addresses import is_local_host
from gymsdk.errors import UsageError
from gymsdk.interpreter import build_module_command

STOP_SECONDS = 12.0
"""Seconds that the servers get to stop before they are killed."""

KILL_SECONDS = 5.0
"""Seconds after which a process guard that does not end is killed itself."""

CHILD_COMMAND = tuple(build_module_command("gymsdk_nemo_compat.child"))

INSECURE_WARNING = (
    "insecure: true: everyone who reaches {host} may use the servers of this run; leave it out if all clients can send"
    " a token\n"
)


class ServerRun:
    """The servers of a training run, in a process of their own.

    Args:
        deployment: The servers.
        resources: Closed once the servers have stopped.

    Attributes:
        head_url: The URL of the head server, as this machine reaches it.
        config: The configuration that the head serves, with the address of each server.
        token: The token that the servers require, `None` if they require none.
    """

    def __init__(self, deployment: Deployment, token: SecretStr | None, resources: ExitStack) -> None:
        self.head_url = ""
        self.config: dict[str, Any] = {}
        self.token = token
        self._resources = resources
        self._process = _start_process(resources)
        self._deployment = deployment

    @classmethod
    def start(cls, deployment: Deployment) -> ServerRun:
        """Start the servers of *deployment*, and wait until all are ready.

        Raises:
            UsageError: The servers cannot be served as requested.
            RuntimeError: The servers end before they are ready.
        """
        with ExitStack() as stack:
            token: SecretStr | None = None
            if deployment.insecure:
                sys.stderr.write(INSECURE_WARNING.format(host=deployment.head_address[0]))
            else:
                file = stack.enter_context(credentials.provide_token(deployment.token_file))
                token = credentials.get_process_token(file)
                deployment = deployment.model_copy(update={"token_file": file})
            for note in filter(None, (*deployment.notes, deployment.ignored_keys_note)):
                sys.stderr.write(f"{note}\n")
            preflight.check_deployment(deployment)
            run = cls(deployment, token, stack)
            run._wait_until_ready()
            run._resources = stack.pop_all()
        _runs.append(run)
        return run

    @property
    def port(self) -> int:
        """The port of the head server."""
        return urlsplit(self.head_url).port or 0

    def connect(self, seconds: float) -> ServerClient:
        """Return a client of the servers, with a time limit of *seconds* per request."""
        return ServerClient(self.head_url, seconds=seconds, token=self.token or "")

    def check(self) -> None:
        """Raise `RuntimeError` if the servers have ended."""
        code = self._process.poll()
        if code is not None:
            raise RuntimeError(f"Process `gymsdk` finished unexpectedly! ({describe_exit(code)}); its output says why")

    def stop(self) -> None:
        """Stop the servers, and wait until they have ended."""
        if self in _runs:
            _runs.remove(self)
        self._resources.close()

    def _wait_until_ready(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(self._deployment.dump_for_child())
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        report = json.loads(line) if line else {}
        if "head" not in report:
            code = self._process.wait()
            if report.get("usage"):
                raise UsageError(report["error"])
            raise RuntimeError(
                report.get("error") or f"the servers ended before they were ready ({describe_exit(code)})"
            )
        self.head_url = report["head"]
        self.config = fetch_config(self.connect(seconds=60.0))


_runs: list[ServerRun] = []
"""The runs of this process, the latest one last."""


def get_latest_run() -> ServerRun:
    """Return the run that this process started last; raises `RuntimeError` if it runs no servers."""
    if not _runs:
        raise RuntimeError("this process runs no servers; start them with nemo_gym.cli.RunHelper")
    return _runs[-1]


def find_client(host: str, port: int, *, seconds: float = 60.0) -> ServerClient:
    """Return a client of the head server at this address, with the token of the run if it is one of this process.

    Args:
        host: The host of the head server.
        port: Its port.
        seconds: The time limit of a request, in seconds.
    """
    candidates = [run for run in _runs if run.port == port]
    if candidates and is_local_host(host):
        return candidates[0].connect(seconds)
    return ServerClient(build_url(host, port), seconds=seconds)


def fetch_config(client: ServerClient) -> dict[str, Any]:
    """Return the configuration that the head server of *client* serves; may be called inside an event loop."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, client.config()).result()


def find_own_cluster() -> str | None:
    """Return the address of the Ray cluster to which this process is connected, `None` if it is connected to none."""
    ray = sys.modules.get("ray")
    return str(ray.get_runtime_context().gcs_address) if ray is not None and ray.is_initialized() else None


@atexit.register
def _stop_all() -> None:
    for run in [*_runs]:
        run.stop()


def _start_process(resources: ExitStack) -> subprocess.Popen[bytes]:
    """Start the process of the servers; it ends when *resources* close, and when this process ends."""
    started: Future[subprocess.Popen[bytes]] = Future()
    # The guard ends the servers when the thread that started it ends, so that this thread waits for the process.
    threading.Thread(target=_run_process, args=(started,), name="gymsdk-servers", daemon=True).start()
    process = started.result()
    resources.callback(_end_process, process)
    return process


def _run_process(started: Future[subprocess.Popen[bytes]]) -> None:
    status, reported = os.pipe()
    try:
        command: list[str] = [*CHILD_COMMAND]
        if process_guard.IS_AVAILABLE:
            command = process_guard.build_command(command, seconds=STOP_SECONDS, status=reported)
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=(reported,), start_new_session=True
        )
    except OSError as error:
        started.set_exception(error)
        return
    finally:
        os.close(reported)
    started.set_result(process)
    # The guard writes the process ID of the servers, which nobody needs.
    os.read(status, 64)
    os.close(status)
    process.wait()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Let the servers stop, and kill what remains."""
    process.terminate()
    try:
        process.wait(STOP_SECONDS + KILL_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in filter(None, (process.stdin, process.stdout)):
        with suppress(BrokenPipeError):
            pipe.close()
