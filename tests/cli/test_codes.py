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

from gymsdk.servers import head
from gymsdk.servers.auth import AuthMiddleware
from tests.servers.nodes import free, heading, listening

COMMANDS = [("rollout", "sums", "--limit", "1"), ("status",), ("restart", "sums")]


async def ended(*words: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "gymsdk", *map(str, words)]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.STDOUT}
    running = await asyncio.create_subprocess_exec(*command, **pipes, env=os.environ)
    said, _ = await running.communicate()
    return running.returncode or 0, said.decode()


@asynccontextmanager
async def guarded() -> AsyncIterator[str]:
    """The address of a head that asks for a token."""
    app = AuthMiddleware(head.create_app((), host="127.0.0.1", port=0), SecretStr("a-token-that-is-long-enough"))
    async with listening(app) as port:
        yield f"http://127.0.0.1:{port}"


def is_empty(folder: Path) -> bool:
    return not list(folder.iterdir())


@pytest.mark.parametrize("words", COMMANDS, ids=lambda each: each[0])
async def test_a_head_that_is_not_there_or_will_not_answer_is_a_failure(
    words: tuple[str, ...], installed: Callable[..., Any], there: Path
) -> None:
    installed()
    code, said = await ended(*words, "--head", f"http://127.0.0.1:{free()}")
    assert (code, "nothing listens there" in said) == (1, True), said
    async with guarded() as address:
        code, said = await ended(*words, "--head", address)
    assert (code, "requires a token; set GYMSDK_TOKEN_FILE" in said) == (1, True), said
    assert is_empty(there)


@pytest.mark.parametrize("words", [COMMANDS[0], COMMANDS[2]], ids=lambda each: each[0])
async def test_a_missing_item_of_a_head_exits_with_1(
    words: tuple[str, ...], installed: Callable[..., Any], there: Path
) -> None:
    installed()
    async with heading(lease=0.2) as address:
        code, said = await ended(*words, "--head", address)
    assert (code, "no agent 'sums_simple_agent'" in said or "unknown server 'sums'" in said) == (1, True), said
    assert is_empty(there)


@pytest.mark.parametrize(
    "words",
    [*COMMANDS, ("serve", "sums"), ("bench", "sums"), ("reverify", ".")],
    ids=lambda each: each[0],
)
async def test_no_command_takes_a_password_with_the_address_of_a_head(
    words: tuple[str, ...], installed: Callable[..., Any]
) -> None:
    installed()
    code, said = await ended(*words, "--head", f"http://me:hush@127.0.0.1:{free()}")
    assert (code, "the URL must not contain a user name and a password" in said, "hush" in said) == (2, True, False), (
        said
    )


async def test_certificates_that_cannot_be_read_are_wrong_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_CA_FILE", "/nowhere/ca.pem")
    for words in (("status",), ("status", "--watch"), ("restart", "sums")):
        code, said = await ended(*words, "--head", f"https://127.0.0.1:{free()}")
        assert (code, "Error: the certificates in /nowhere/ca.pem cannot be read" in said) == (2, True), said


async def test_a_malformed_address_exits_with_2(installed: Callable[..., Any], there: Path) -> None:
    installed()
    code, said = await ended("rollout", "sums", "--head", "localhost:11000")
    assert (code, "write it as a URL" in said) == (2, True), said
