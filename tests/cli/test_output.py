"""What an environment prints or writes to descriptor 1 is not part of a command's output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from sums_environment import SUMS

NOISY = """
import atexit, ctypes, os, subprocess, sys, threading, time

def make_noise(place):
    print("noise: print in", place)
    sys.__stdout__.write(f"noise: the original stream in {place}\\n")
    sys.__stdout__.flush()
    os.write(1, b"noise: write\\n")
    libc = ctypes.CDLL(None)
    libc.puts(b"noise: C code")
    libc.fflush(None)
    subprocess.run(["echo", "noise: child"])
    pid = os.fork()
    if not pid:
        print("noise: fork")
        os.write(1, b"noise: fork\\n")
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)

make_noise("import")
atexit.register(make_noise, "exit")
""" + SUMS.replace("async def verify(", "async def verify(").replace(
    "@hookimpl\nasync def verify", "@hookimpl\ndef close():\n    make_noise('close')\n\n@hookimpl\nasync def verify"
)


@pytest.fixture
def noisy(installed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install an environment that writes to standard output in every way, and return the working folder."""
    installed(source=NOISY)
    folder = tmp_path / "there"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "gymsdk", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def read_documents(text: str) -> list[object]:
    """Return the JSON documents in *text*, which must hold nothing else."""
    decoder, documents = json.JSONDecoder(), []
    rest = text.strip()
    while rest:
        document, end = decoder.raw_decode(rest)
        documents.append(document)
        rest = rest[end:].strip()
    return documents


PLAYED = ("rollout", "sums", "--limit", 1, "-o", "out", "--json")


@pytest.mark.parametrize(
    "words",
    [
        ("info", "sums", "--json"),
        ("tasks", "sums", "-n", 2),
        ("tasks", "sums", "-n", 2, "-o", "rows.jsonl", "--json"),
        ("play", "sums", "--model", "scripted/oracle", "--json"),
        ("play", "sums", "--model", "scripted/oracle", "--gym", "--json"),
        ("check", "sums", "--only", "runtime.load", "--json"),
        ("bench", "sums", "--concurrency", 1, "--rollouts", 4, "--json"),
        PLAYED,
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_a_command_prints_nothing_but_its_json(words: tuple[object, ...], noisy: Path) -> None:
    result = run(*words)
    assert result.returncode in (0, 1), result.stderr
    assert read_documents(result.stdout)
    assert "noise" not in result.stdout
    assert "noise: write" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("replay", "out", "--json"),
        ("reverify", "out", "--json"),
        ("show", "out", "--json"),
        ("compare", "out", "out", "--json"),
    ],
    ids=lambda words: words[0],
)
def test_a_command_on_a_run_prints_nothing_but_its_json(words: tuple[object, ...], noisy: Path) -> None:
    assert run(*PLAYED).returncode == 0
    result = run(*words)
    assert result.returncode == 0, result.stderr
    assert read_documents(result.stdout)
    assert "noise" not in result.stdout


def test_a_configuration_is_printed_without_the_output_of_its_environment(noisy: Path) -> None:
    (noisy / "a.yaml").write_text("sums:\n  resources_servers:\n    sums: {entrypoint: app.py}\n")
    result = run("config", "--config", "a.yaml", "--json")
    assert read_documents(result.stdout), result.stderr
    assert "noise" not in result.stdout


def test_output_is_dropped_if_descriptor_1_is_closed(noisy: Path) -> None:
    command = f"{sys.executable} -m gymsdk list --json >&-"
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=60)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_help_and_the_version_go_to_standard_output() -> None:
    assert run("list", "--help").stdout.startswith("Usage:")
    assert run("--version").stdout.startswith("gymsdk ")


def test_a_server_announces_itself_on_standard_output_only(noisy: Path) -> None:
    command = [sys.executable, "-m", "gymsdk", "serve", "sums", "--port", "0", "--model", "scripted/null", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["pid"] == process.pid
        finally:
            process.terminate()
            out, _ = process.communicate(timeout=60)
    assert out == ""


def test_a_forked_child_does_not_keep_the_output_open(noisy: Path, installed: Callable[..., Path]) -> None:
    fork = "if not os.fork():\n    os.close(0), os.close(1), os.close(2)\n    time.sleep(30)\n    os._exit(0)\n"
    installed(source=NOISY.replace('make_noise("import")', fork))
    read, write = os.pipe()
    with os.fdopen(read, "rb") as pipe:
        command = [sys.executable, "-W", "ignore", "-m", "gymsdk", "info", "sums", "--json"]
        process = subprocess.Popen(command, stdout=write, stderr=subprocess.DEVNULL)
        os.close(write)
        os.set_blocking(read, False)
        assert process.wait(60) == 0
        content = b""
        while chunk := pipe.read(65536):
            content += chunk
    assert chunk == b"", "the child holds the pipe"
    assert json.loads(content)["name"] == "sums"
