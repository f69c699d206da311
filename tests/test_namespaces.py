"""Nodes in network namespaces of their own, as on machines of their own: a cable is pulled, and nobody says goodbye."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deployed import Deployed, Run, command, serving, until

from gymsdk.servers.reports import LEASE_SECONDS

COORDINATOR, FIRST, SECOND, CLIENT = 1, 2, 3, 9
HEAD = "http://10.77.0.1:11000"


@dataclass
class Network:
    """Namespaces that a bridge in one more connects; each has the address 10.77.0.N."""

    name: str

    def within(self, number: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", f"{self.name}-{number}")

    def link(self, number: int, state: str) -> None:
        """Pull the cable of one, *state* `down`, or put it back, `up`."""
        ip("-n", f"{self.name}-hub", "link", "set", f"to{number}", state)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def networked(*numbers: int) -> Iterator[Network]:
    found = Network(f"gymsdk{os.getpid()}")
    hub = f"{found.name}-hub"
    names = [hub]
    try:
        ip("netns", "add", hub)
        ip("-n", hub, "link", "add", "bridge", "type", "bridge")
        ip("-n", hub, "link", "set", "bridge", "up")
        for number in numbers:
            name = f"{found.name}-{number}"
            ip("netns", "add", name)
            names.append(name)
            ip("-n", hub, "link", "add", f"to{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("-n", hub, "link", "set", f"to{number}", "master", "bridge", "up")
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            for each in ("lo", "eth0"):
                ip("-n", name, "link", "set", each, "up")
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@pytest.fixture
def network() -> Iterator[Network]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces are made by root, with ip")
    try:
        with networked(COORDINATOR, FIRST, SECOND, CLIENT) as found:
            yield found
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_machine_whose_cable_is_pulled_is_gone_in_15_seconds_and_back_with_the_cable(
    network: Network, tmp_path: Path
) -> None:
    (token := tmp_path / "token").write_text("0123456789abcdef" * 2)
    token.chmod(0o600)
    client = (*network.within(CLIENT), "env", f"GYMSDK_TOKEN_FILE={token}")

    async def status() -> tuple[int, dict[str, Any]]:
        code, said = await command("status", "--json", "--head", HEAD, within=client)
        return code, json.loads(said)

    async def places(name: str) -> list[str]:
        return sorted(each["url"].rpartition(":")[0] for each in (await status())[1]["servers"] if each["name"] == name)

    async def are(*wanted: int) -> bool:
        return await places("math") == [f"http://10.77.0.{number}" for number in wanted]

    async with AsyncExitStack() as stack:

        async def begun(number: int, *words: object) -> Deployed:
            more = ("--host", "0.0.0.0", "--token-file", token)
            return await stack.enter_async_context(serving(*words, *more, within=network.within(number)))

        await begun(COORDINATOR, "--role", "head", "--port", 11000)
        await begun(COORDINATOR, "math", "--role", "model", "--model", "scripted/oracle:0.7", "--head", HEAD)
        first = await begun(FIRST, "math", "--role", "resources", "--head", HEAD)
        # Who listens at every address is told of by the one that its word comes from.
        assert first.told["servers"]["math"]
        await until(lambda: are(FIRST))
        calm, run = (Run(HEAD, ("math",), tmp_path / name, 60, 5, within=client) for name in ("calm", "run"))
        await calm.end(await calm.begin())
        assert (await status())[0] == 0

        await begun(SECOND, "math", "--role", "resources", "--head", HEAD)
        await until(lambda: are(FIRST, SECOND))
        # Heard of both while both are there: a second that joined after the first's last word might stand for it.
        await asyncio.sleep(LEASE_SECONDS / 2)
        playing = await run.begin()
        await run.reached(60)
        network.link(FIRST, "down")
        gone = asyncio.ensure_future(until(lambda: are(SECOND), 15))
        await run.end(playing)
        await gone
        assert run.content() == calm.content()
        assert (await status())[0] == 1

        network.link(FIRST, "up")
        await until(lambda: are(FIRST, SECOND))
        assert (await status())[0] == 0
