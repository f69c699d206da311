"""Handing down: what a supervisor gives the servers it starts, settings by a pipe, where nobody else reads them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from gymsdk import lifeline
from gymsdk.descriptors import ListeningSocket
from gymsdk.errors import GymsdkError, UsageError

HEAD = "head_server"
"""What the head is called among the servers that are started."""

OPTIONS = ("--set", "--pin", "--model", "--base-url")
"""Options whose values may have a key in them, an address its query."""

STEPS = ("--separate", "--json", "--open", "--launch-vllm")
"""Options that are the supervisor's alone."""


class Handed(BaseModel):
    """What a command sets: *overrides* of its files, *settings* of environments, the *model*, its *pins* and addresses.

    Any of them may be a key, as *key* is, the model's: by which words and variables a process was started, others on
    its machine can read for as long as it lives. Those that one *supervisor* starts know each other by that.
    """

    model_config = ConfigDict(frozen=True, hide_input_in_errors=True)

    overrides: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    model: str | None = None
    pins: tuple[str, ...] = ()
    base_urls: tuple[str, ...] = ()
    key: str | None = None
    supervisor: str = ""

    def line(self) -> bytes:
        """Give the line that hands them down."""
        return self.model_dump_json().encode() + b"\n"


def taken(file: int) -> Handed:
    """Give what the supervisor hands down beside the socket under the number *file*.

    Raises `UsageError` where there is no such socket, `GymsdkError` where nothing is handed down.
    """
    socket_at(file).detach()
    try:
        return Handed.model_validate_json(lifeline.line())
    except ValidationError:
        raise GymsdkError(
            "what this server is told to be is none of ours; leave --only and --fd to --separate"
        ) from None


def again(words: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Give the *words* of the command by which one of its servers is started: without settings, *overrides* among them.

    What is the supervisor's alone is left out too.
    """
    kept = list(words[: words.index("--")] if "--" in words else words)
    for option in (*OPTIONS, "--head", "--port"):
        kept = _without(kept, option)
    pairs = zip(["", *kept], kept, strict=False)
    return [
        word for before, word in pairs if word not in STEPS and (word not in overrides or before == "--server-port")
    ]


def socket_at(file: int) -> socket.socket:
    """Give the socket that is open under a number; raises `UsageError` where none is that listens."""
    try:
        at = socket.socket(fileno=file)
        if at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            # What a server starts in its turn is not to keep its port.
            os.set_inheritable(file, False)
            return ListeningSocket.from_socket(at)
        at.detach()
    except OSError:
        pass
    raise UsageError(f"--fd {file}: no socket that listens is open under that number; leave --fd to --separate")


def _without(words: list[str], option: str) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word == option:
            next(rest, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept
