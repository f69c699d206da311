"""The deployment on standard input and the socket that a server in its own process inherits from its supervisor.

Every user of the machine can read the arguments and the environment of a process, so that neither holds a setting.
"""

from __future__ import annotations

import json
import os
import select
import socket
import time

from gymsdk.config.model import Deployment
from gymsdk.errors import GymsdkError, UsageError

HEAD_SERVER = "head_server"
"""The name of the head among the servers of a deployment."""

CONFIG_WAIT_SECONDS = 60.0
"""Seconds that the supervisor may take to write the configuration line."""


def read_deployment(file: int) -> Deployment:
    """Read the deployment that the supervisor writes to standard input, beside the socket *file*.

    Args:
        file: The descriptor of the socket: a listening one, or the channel of a worker.

    Raises:
        UsageError: No such socket is open under the number *file*.
        GymsdkError: Standard input does not hold a deployment.
    """
    if not _is_channel(file):
        # Only checked here: the server opens it again by its number.
        open_socket(file).detach()
    try:
        return Deployment.model_validate(json.loads(read_config_line()))
    except ValueError:
        raise GymsdkError(
            "the configuration on this server's standard input is invalid; only a supervisor may pass --only and --fd"
        ) from None


def read_config_line(file: int = 0, *, seconds: float = CONFIG_WAIT_SECONDS) -> bytes:
    """Read the line that the supervisor writes to a server's standard input when the server starts.

    Args:
        file: The descriptor to read from, by default standard input.
        seconds: The longest time to wait for the line.

    Raises:
        GymsdkError: The line does not arrive in time, or the parent ends before it has written the line.
    """
    line = b""
    deadline = time.monotonic() + seconds
    while not line.endswith(b"\n"):
        remaining = deadline - time.monotonic()
        if remaining <= 0 or not select.select([file], [], [], remaining)[0]:
            raise GymsdkError(
                f"this server received no configuration on standard input within {seconds:g} s;"
                " start it with `gymsdk serve NAME --separate`"
            )
        if not (chunk := os.read(file, 65536)):
            raise GymsdkError(
                "the process that started this server ended before it sent the configuration; start that process again"
            )
        line += chunk
    return line


def _is_channel(file: int) -> bool:
    """Return whether *file* is the channel of a worker, and keep the children of this process from inheriting it."""
    try:
        # A copy of the descriptor, because the context closes it.
        with socket.socket(fileno=os.dup(file)) as sock:
            is_channel = sock.family == socket.AF_UNIX
    except OSError:
        return False
    if is_channel:
        os.set_inheritable(file, False)
    return is_channel


def open_socket(file: int) -> socket.socket:
    """Return the listening socket under the descriptor *file*; raises `UsageError` if there is none."""
    try:
        sock = socket.socket(fileno=file)
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            # A child of this server must not inherit the socket: it would keep the port in use.
            os.set_inheritable(file, False)
            return sock
        sock.detach()
    except OSError:
        pass
    raise UsageError(f"--fd {file}: no listening socket is open under this number; only --separate may pass --fd")
