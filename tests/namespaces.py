"""Network namespaces with separate addresses, which behave like separate machines on one network."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass
class Network:
    """Network namespaces whose addresses end in N, connected by a bridge in another namespace."""

    name: str

    def within(self, number: int) -> tuple[str, ...]:
        return ("ip", "netns", "exec", f"{self.name}-{number}")

    def link(self, number: int, state: str) -> None:
        """Set the link of namespace *number* to *state*, `down` or `up`."""
        ip("-n", f"{self.name}-hub", "link", "set", f"to{number}", state)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def create_network(*numbers: int, subnet: str) -> Iterator[Network]:
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
            ip("-n", name, "addr", "add", f"{subnet}.{number}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", name, "link", "set", device, "up")
        yield found
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextmanager
def connect_machines(*numbers: int, subnet: str = "10.77.0") -> Iterator[Network]:
    """Yield namespaces with the addresses SUBNET.N; skip the test where they cannot be created."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root and the ip command")
    try:
        with create_network(*numbers, subnet=subnet) as found:
            yield found
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
