"""Test the files in `deploy/`: run their commands as processes, and parse the files like the programs that use them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import pytest
import yaml

from gymsdk import model, testing

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
GYMSDK = [sys.executable, "-m", "gymsdk"]
HEALTHY = [sys.executable, str(DEPLOY / "healthy.py")]
TOKEN = "0123456789abcdef0123456789abcdef"
CARRIED = {"Authorization": f"Bearer {TOKEN}"}
PORT = re.compile(r"\b11\d{3}\b")
SENT = {"responses_create_params": {"input": [{"role": "user", "content": "What is 40 + 2?"}]}, "expected_answer": "42"}

Start: TypeAlias = Callable[..., "subprocess.Popen[bytes]"]


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def composed() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


@dataclass(frozen=True)
class Composed:
    """The services of the compose file, with commands adapted to one machine."""

    services: dict[str, Any]
    ports: dict[str, int]

    def command(self, service: str) -> list[str]:
        return [*GYMSDK, *map(self._here, self.services[service]["command"])]

    def health(self, service: str) -> list[str]:
        kind, program, *words = self.services[service]["healthcheck"]["test"]
        assert (kind, program) == ("CMD", "healthy")
        return [*HEALTHY, *map(self._here, words)]

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{self.ports[str(port)]}"

    def _here(self, word: str) -> str:
        word = PORT.sub(lambda found: str(self.ports[found[0]]), word)
        return word.replace("http://head:", "http://127.0.0.1:")


@pytest.fixture
def compose() -> Composed:
    return Composed(composed()["services"], defaultdict(free))


@pytest.fixture
async def secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Path]:
    """Return a folder with the files of a container: the token, and the policy endpoint in `env.yaml`."""
    for variable in ("BASE_URL", "API_KEY", "MODEL"):
        monkeypatch.delenv(f"GYMSDK_{variable}", raising=False)
    (tmp_path / "token.txt").write_text(TOKEN)
    (tmp_path / "token.txt").chmod(0o600)
    monkeypatch.setenv("GYMSDK_TOKEN_FILE", str(tmp_path / "token.txt"))
    async with testing.serve(testing.build_app(model("scripted/echo"))) as address:
        written = {"policy_base_url": address, "policy_api_key": "sk-none", "policy_model_name": "small"}
        (tmp_path / "env.yaml").write_text(yaml.safe_dump(written))
        (tmp_path / "env.yaml").chmod(0o600)
        yield tmp_path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts a process in that folder; each process must exit with 0 at the end of the test."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(words: list[str]) -> subprocess.Popen[bytes]:
        started.append(process := subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.DEVNULL))
        return process

    yield begin
    for process in reversed(started):
        process.terminate()
    codes = [process.wait(20) for process in started]
    assert set(codes) <= {0, -signal.SIGKILL}


async def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    import asyncio

    async with asyncio.timeout(seconds):
        while not (found := await asyncio.to_thread(true)):  # noqa: ASYNC110  # no event to wait for
            await asyncio.sleep(0.2)
    return found


def ended(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


async def test_the_containers_play_rollouts_together(compose: Composed, secrets: Path, start: Start) -> None:
    assert ended(compose.health("math")).returncode == 1
    running = {name: start(compose.command(name)) for name in compose.services}
    for name in compose.services:
        await until(lambda name=name: ended(compose.health(name)).returncode == 0)
    status = [*GYMSDK, "status", "--head", compose.url(11000)]
    await until(lambda: ended(status).returncode == 0)
    async with httpx.AsyncClient(headers=CARRIED, timeout=60) as client:
        line = (await client.post(f"{compose.url(11002)}/run", json=SENT)).json()
        assert (line["reward"], line["response"]["model"]) == (0.0, "policy")
        answer = (await client.get(f"{compose.url(11000)}/nodes")).text
        assert TOKEN not in answer
        assert "sk-none" not in answer
        assert (await client.get(compose.url(11001), headers={"Authorization": ""})).status_code == 401
    running["math"].kill()
    answer = await until(
        lambda: json.loads(found) if "missing" in (found := ended([*status, "--json"]).stdout) else None
    )
    assert [each["name"] for each in answer["servers"] if each["wrong"]] == ["math"]


def test_the_containers_of_the_compose_file_are_restricted() -> None:
    for name, service in composed()["services"].items():
        assert service["restart"] == "unless-stopped", name
        assert service["cap_drop"] == ["ALL"], name
        assert service["environment"] == {"GYMSDK_TOKEN_FILE": "/run/secrets/token"}, name
        assert "token" in service["secrets"], name
        assert "--insecure" not in service["command"], name
        ports = re.findall(PORT, " ".join(service["command"]).replace("http://head:11000", ""))
        assert service["healthcheck"]["test"][2:] == ports, name


def test_the_compose_file_publishes_ports_on_loopback_only() -> None:
    published = [each for service in composed()["services"].values() for each in service.get("ports", [])]
    assert published == ["127.0.0.1:11000:11000"]


def instructions() -> list[tuple[str, str]]:
    """Return each instruction of the Dockerfile with its arguments."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def arguments_of(instruction: str) -> list[str]:
    return [rest for word, rest in instructions() if word == instruction]


def test_the_dockerfile_has_known_instructions_and_a_user_other_than_root() -> None:
    known = {"FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {word for word, _ in instructions()} == known
    assert arguments_of("USER") == ["gymsdk"]
    order = [word for word, _ in instructions()]
    assert order.index("USER") > max(at for at, word in enumerate(order) if word == "RUN")


def test_the_dockerfile_copies_and_builds_existing_files() -> None:
    copied = [word for line in arguments_of("COPY") for word in shlex.split(line)[:-1] if not word.startswith("--")]
    built = shlex.split(arguments_of("RUN")[0].partition("/wheels ")[2])
    assert all((ROOT / path).exists() for path in copied)
    assert built[0] == "."
    assert all((ROOT / path / "pyproject.toml").is_file() for path in built)


async def test_the_command_of_the_dockerfile_serves_and_is_healthy(secrets: Path, start: Start) -> None:
    [entry], [words] = map(json.loads, arguments_of("ENTRYPOINT")), map(json.loads, arguments_of("CMD"))
    assert entry == ["gymsdk"]
    port = str(free())
    start([*GYMSDK, *words, "--model", "scripted/null", "--port", port])
    check = json.loads(arguments_of("HEALTHCHECK")[0].partition("CMD ")[2])
    assert check == ["healthy", "11000"]
    await until(lambda: ended([*HEALTHY, port]).returncode == 0)


def test_an_unhealthy_server_is_reported_with_its_port(secrets: Path) -> None:
    port = str(free())
    found = ended([*HEALTHY, port])
    assert (found.returncode, found.stderr[: len(port) + 7]) == (1, f"port {port}: ")


TOKENS = re.compile(r'\s*(?:#[^\n]*|("[^"]*"|[^\s;{}"]+)|([;{}]))')

Directive: TypeAlias = "tuple[list[str], list[Directive]]"


def directives(text: str) -> list[Directive]:
    """Parse an nginx configuration; return the words and the block of each directive."""
    stack: list[list[Directive]] = [[]]
    words: list[str] = []
    at = 0
    while found := TOKENS.match(text, at):
        at = found.end()
        if found[1]:
            words.append(found[1].strip('"'))
        elif found[2] == "}":
            assert not words, f"{words} has no semicolon"
            stack.pop()
        elif found[2]:
            assert words, "a directive has a name"
            stack[-1].append((words, below := []))
            stack += [below] if found[2] == "{" else []
            words = []
    assert not text[at:].strip()
    assert len(stack) == 1
    return stack[0]


def within(text: str, name: str) -> Iterator[tuple[list[str], list[Directive]]]:
    """Yield the directives called *name* at any depth."""
    waiting = directives(text)
    while waiting:
        words, below = waiting.pop(0)
        if words[0] == name:
            yield words[1:], below
        waiting += below


def test_nginx_serves_each_server_under_a_separate_path() -> None:
    text = (DEPLOY / "nginx.conf").read_text()
    comment = " ".join(line.strip("# \\") for line in text.splitlines() if line.startswith("#"))
    [prefix] = re.findall(r"--root-path (\S+)", comment)
    ports = {"": "11000"} | dict(re.findall(r"--server-port (\w+)=(\d+)", comment))
    upstreams = {words[0]: {each[0]: each[1:] for each, _ in below} for words, below in within(text, "upstream")}
    shown = {
        words[0]: upstreams[below[0][0][1].removeprefix("http://")]["server"]
        for words, below in within(text, "location")
    }
    expected = {f"{prefix}/{name}/" if name else f"{prefix}/": [f"127.0.0.1:{port}"] for name, port in ports.items()}
    assert shown == expected


def test_nginx_has_longer_timeouts_and_shorter_keepalive_than_the_servers() -> None:
    from gymsdk.config.model import MAX_BODY_BYTES
    from gymsdk.edge.listener import KEEP_ALIVE_SECONDS
    from gymsdk.types import Budget

    text = (DEPLOY / "nginx.conf").read_text()
    timeouts = {
        name: [words[0] for words, _ in within(text, name)] for name in ("keepalive_timeout", "proxy_read_timeout")
    }
    assert all(float(each.rstrip("s")) < KEEP_ALIVE_SECONDS for each in timeouts["keepalive_timeout"])
    assert all(float(each.rstrip("s")) > (Budget().seconds or 0) for each in timeouts["proxy_read_timeout"])
    [(size, _)] = within(text, "client_max_body_size")
    assert size == [f"{MAX_BODY_BYTES // 2**20}m"]


def test_prometheus_scrapes_every_server_of_the_compose_file_with_the_token() -> None:
    [job] = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    # Prometheus scrapes each address of a name: docker compose up --scale math=2 creates two.
    expected = [
        {"names": [name], "type": "A", "port": int(port), "refresh_interval": "10s"}
        for name, service in composed()["services"].items()
        for port in service["healthcheck"]["test"][2:]
    ]
    assert job["dns_sd_configs"] == expected
    assert job["authorization"]["type"] == "Bearer"


def test_the_compose_file_contains_no_secret() -> None:
    assert not re.search(r"(?i)(api_key|token|secret)\s*[:=]\s*[\"']?(sk-|[0-9a-f]{16})", json.dumps(composed()))
    assert os.access(DEPLOY / "healthy.py", os.X_OK)
