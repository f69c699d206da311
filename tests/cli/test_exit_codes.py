"""Exit codes of commands that query a head: 1 for failures of the head, 2 for wrong input."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from gymsdk.edge.auth import AuthMiddleware
from gymsdk.servers import head
from tests.servers.nodes import find_free_port, serve_app, serve_head

COMMANDS = [("rollout", "sums", "--limit", "1"), ("status",), ("restart", "sums")]


async def run_command(*arguments: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "gymsdk", *map(str, arguments)]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    process = await asyncio.create_subprocess_exec(*command, **pipes, env=os.environ)
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


@asynccontextmanager
async def serve_protected_head() -> AsyncIterator[str]:
    """Serve a head that requires a token and yield its URL."""
    app = AuthMiddleware(head.create_app((), host="127.0.0.1", port=0), SecretStr("a-token-that-is-long-enough"))
    async with serve_app(app) as port:
        yield f"http://127.0.0.1:{port}"


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


@pytest.mark.parametrize("arguments", COMMANDS, ids=lambda words: words[0])
async def test_a_missing_or_protected_head_is_a_failure(
    arguments: tuple[str, ...], installed: Callable[..., Any], workdir: Path
) -> None:
    installed()
    code, output = await run_command(*arguments, "--head", f"http://127.0.0.1:{find_free_port()}")
    assert (code, "nothing listens there" in output) == (1, True), output
    async with serve_protected_head() as address:
        code, output = await run_command(*arguments, "--head", address)
    assert (code, "requires a token; set GYMSDK_TOKEN_FILE" in output) == (1, True), output
    assert is_empty(workdir)


@pytest.mark.parametrize("arguments", [COMMANDS[0], COMMANDS[2]], ids=lambda words: words[0])
async def test_a_server_missing_at_the_head_exits_with_1(
    arguments: tuple[str, ...], installed: Callable[..., Any], workdir: Path
) -> None:
    installed()
    async with serve_head(lease=0.2) as address:
        code, output = await run_command(*arguments, "--head", address)
    assert (code, "no agent 'sums_simple_agent'" in output or "unknown server 'sums'" in output) == (1, True), output
    assert is_empty(workdir)


async def test_unreadable_certificates_are_reported_as_wrong_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_CA_FILE", "/nowhere/ca.pem")
    for arguments in (("status",), ("status", "--watch"), ("restart", "sums")):
        code, output = await run_command(*arguments, "--head", f"https://127.0.0.1:{find_free_port()}")
        assert (code, "Error: the certificates in /nowhere/ca.pem cannot be read" in output) == (2, True), output
