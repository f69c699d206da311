"""A supervisor passes settings to its servers through a pipe, and each server inherits only its socket."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import SUMS

from cli.conftest import Start
from gymsdk.cli.deployment import ListenOptions, LogOptions, ModelOptions, ServeOptions
from gymsdk.deploy import child
from gymsdk.episode import Budget
from gymsdk.errors import Failed, GymsdkError
from gymsdk.http import client

OFFLOADED = SUMS.replace("from gymsdk import ", "from gymsdk import offload, ").replace(
    "@hookimpl\nasync def verify",
    "@offload(timeout=60.0)\ndef same(one, other):\n    return one == other\n\n@hookimpl\nasync def verify",
)
OFFLOADED = OFFLOADED.replace("text == str(task.answer)", "await same(text, str(task.answer))")
"""Source of the additions with a verifier that uses a worker process."""


@contextmanager
def replace_stdin(line: bytes) -> Iterator[None]:
    """Replace standard input by *line* followed by the end of file."""
    original, (read, write) = os.dup(0), os.pipe()
    os.write(write, line)
    os.close(write)
    os.dup2(read, 0)
    os.close(read)
    try:
        yield
    finally:
        os.dup2(original, 0)
        os.close(original)


def options(**given: Any) -> ServeOptions:
    """The options of a command that gives as many of them as possible."""
    model = ModelOptions(
        name="vllm/x",
        base_urls=("http://127.0.0.1:9/v1?key=hush",),
        api="responses",
        pins=("user=hush",),
        token_ids=True,
        timeout=math.inf,
        key="hush",
    )
    listen = ListenOptions(
        host="127.0.0.1",
        advertise_host="here",
        port=0,
        ports={"a=1": 7},
        head="http://127.0.0.1:8",
        role="resources",
        separate=True,
        root_path="/p",
        supervisor="one",
    )
    whole = {
        "names": ("sums",),
        "settings": {"sums": {"key": "hush", "list": [1, None, 2**80]}},
        "setting_pairs": ("key=hush", "list=[1, null]"),
        "files": (Path("a b.yaml"),),
        "overrides": ("policy_api_key=a\nb", "~x"),
        "model": model,
        "listen": listen,
        "token_file": Path("token"),
        "insecure": True,
        "tls": (Path("cert"), Path("key")),
        "limits": {"body": 2048},
        "budget": Budget(turns=2, tools=3, seconds=4.5),
        "max_output": 1500,
        "ttl": 9.5,
        "sessions": 3,
        "mcp": True,
        "logs": LogOptions(level="info", format="json", directory=Path("logs")),
        "profile": Path("profile"),
        "capture": Path("capture"),
    }
    return ServeOptions.model_validate(whole | given)


def test_a_separate_server_gets_all_options_but_those_that_only_its_supervisor_reads() -> None:
    own = options()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        file = listener.fileno()
        with replace_stdin(own.build_child_settings("sums", file, "http://127.0.0.1:7")):
            received = child.read_settings(ServeOptions, file)
        # The server can use the socket.
        assert listener.getsockname()[1] > 0
    changed = {"only": "sums", "socket_fd": file, "head": "http://127.0.0.1:7", "port": None, "separate": False}
    assert received == own.model_copy(update={"listen": own.listen.model_copy(update=changed)})
    assert received.model_copy(update={"listen": own.listen}).build_options(None).budget.output == 1500


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"", "ended before it sent the configuration"),
        (b'{"key": "hush"', "ended before"),
        (b'{"key": 3}\n', "only --separate may pass --only"),
    ],
)
def test_invalid_secret_options_end_the_server_with_a_message_that_does_not_quote_them(
    line: bytes, message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, replace_stdin(line):
        with pytest.raises(GymsdkError, match=message) as caught:
            child.read_settings(ServeOptions, listener.fileno())
        assert "hush" not in str(caught.value)


def test_waiting_for_secret_options_has_a_time_limit() -> None:
    read, write = os.pipe()
    with (
        os.fdopen(read, "rb"),
        os.fdopen(write, "wb"),
        pytest.raises(GymsdkError, match=r"received no configuration on standard input within 0\.1 s"),
    ):
        child.read_config_line(read, seconds=0.1)


def test_an_inherited_socket_is_not_inherited_further() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        file = os.dup(listener.fileno())
        os.set_inheritable(file, True)
        with child.open_socket(file):
            assert not os.get_inheritable(file)


def find_server_processes(process: subprocess.Popen[str]) -> list[int]:
    """Return the process ids of the guards of the servers that *process* has started."""
    found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(pid) for pid in found if b"--only" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def list_descendants(pid: int) -> list[int]:
    """Return the process ids of a process and its descendants."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def grade(url: str, answer: int) -> float:
    """Return the reward of the server at *url* for *answer* to a task with the expected answer 2."""
    reply = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": str(answer)}]}
    request = {"responses_create_params": {"input": "1 + 1?"}, "response": {"output": [reply]}, "answer": 2}
    response = httpx.post(f"{url}/verify", json=request, timeout=60)
    return float(response.raise_for_status().json()["reward"])


def test_no_setting_appears_in_the_arguments_or_variables_of_a_process(
    start: Start, installed: Callable[..., Path]
) -> None:
    installed(source=OFFLOADED)
    address = "http://127.0.0.1:9/v1?key=hush-address"
    process = start(
        "serve",
        "sums",
        "--separate",
        "--port",
        0,
        "--json",
        "--set",
        "key=hush-set",
        "--model",
        "vllm/x",
        "--base-url",
        address,
        "--pin",
        "user=hush-pin",
        "policy_api_key=hush-override",
    )
    line = process.stdout.readline()
    assert line, process.stderr.read()
    started = find_server_processes(process)
    served = json.loads(line)["servers"]
    assert len(started) == 1 + len(served)
    # A grading worker can see the processes of its own user.
    assert (grade(served["sums"]["url"], 2), grade(served["sums"]["url"], 3)) == (1.0, 0.0)
    processes = [pid for each in started for pid in list_descendants(each)]
    visible = {
        pid: b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ")) for pid in processes
    }
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert len(processes) > len(started)
    assert [pid for pid, arguments in visible.items() if b"hush" in arguments] == []
    assert "--set key is on the command line, which all users of this machine can read" in errors
    assert errors.count("policy_api_key is on the command line") == 1
    assert "hush-" not in line + errors


def test_a_child_server_uses_the_secret_options(start: Start, installed: Callable[..., Path]) -> None:
    process = start(
        "serve", "sums", "--separate", "--port", 0, "--json", "--set", "digits=1", "--model", "scripted/null"
    )
    line = process.stdout.readline()
    assert line, process.stderr.read()
    agent = json.loads(line)["servers"]["sums_simple_agent"]["url"]
    request = {"responses_create_params": {"input": [{"role": "user", "content": "1 + 1?"}]}, "answer": 2}
    assert httpx.post(f"{agent}/run", json=request, timeout=30).json()["reward"] == 0.0


async def test_a_secret_key_is_sent_to_the_model() -> None:
    headers: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        model = ModelOptions(name="vllm/x", base_urls=(url,), timeout=30.0, key="hush-key").build_model()
        assert model is not None
        with pytest.raises(Failed):
            await model.respond({"input": "hello"})
    await client.aclose()
    assert all(b"Authorization: Bearer hush-key" in each for each in headers)
    assert headers
