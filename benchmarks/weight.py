"""Measure the size of an installation and the CPU time of the first commands.

usage: weight.py [WHEELS [VENV]]

The script installs the wheels in the folder WHEELS (default: builds them from this checkout) into a new virtual
environment at VENV (default: a temporary folder). The exit status is 1 if a limit is exceeded.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parent.parent
UNCOUNTED = {"gymnasium", "numpy", "pip", "setuptools"}
"""Distributions that do not count: gymnasium and numpy, and those that every virtual environment contains."""

INVENTORY = """
import json, re
from importlib.metadata import distributions
def name(text): return re.sub(r"[-_.]+", "-", re.match(r"[\\w.-]+", text)[0]).lower()
def size(file): return file.stat().st_size if file.exists() else 0
print(json.dumps({
    name(one.name): {
        "size": sum(size(one.locate_file(file)) for file in one.files or ()),
        "needs": [name(each) for each in one.requires or () if "extra ==" not in each],
    }
    for one in distributions()
}))
"""
"""A program that prints the distributions of its interpreter: bytes on disk (with compiled files) and requirements."""


@dataclass(frozen=True)
class Figure:
    """One measurement and its limit, if it has a limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def within_limit(self) -> bool:
        """Whether the value is within the limit."""
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        bound = "" if self.limit is None else f" (limit {self.limit:g})"
        return f"{self.name:<52} {self.value:8.3g} {self.unit}{bound}{'' if self.within_limit else '  EXCEEDED'}"


class Installed(TypedDict):
    """One distribution: its size in bytes, and the names of its requirements."""

    size: int
    needs: list[str]


Inventory = dict[str, Installed]
"""The installed distributions by name."""


def main() -> None:
    """Print all measurements."""
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(sys.argv[1]) if len(sys.argv) > 1 else build_wheels(Path(scratch, "wheels"))
        home = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(scratch, "venv")
        figures = list(measure_installation(wheels, home))
    print(*figures, "* without gymnasium and numpy, but with gymsdk itself", sep="\n")
    if not all(figure.within_limit for figure in figures):
        sys.exit(1)


def build_wheels(wheels: Path) -> Path:
    """Build the wheels of this checkout into *wheels*."""
    projects = [ROOT, ROOT / "environments" / "math"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", wheels, *projects], check=True)
    return wheels


def measure_installation(wheels: Path, home: Path) -> Iterator[Figure]:
    """Install gymsdk, then gym-env-math, and yield the measurements."""
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    host = install(python, wheels, "gymsdk")
    counted = host.keys() - UNCOUNTED
    yield Figure("pip install gymsdk: distributions*", len(counted), "", 42)
    yield Figure("pip install gymsdk: MB*", megabytes(host, counted), "MB", 78)
    yield Figure(
        "pip install gymsdk: distributions with gymnasium, numpy", len(host.keys() - {"pip", "setuptools"}), ""
    )
    both = install(python, wheels, "gym_env_math")
    added = both.keys() - host.keys()
    yield Figure("pip install gym-env-math adds: distributions", len(added), "", 2)
    yield Figure("pip install gym-env-math adds: MB", megabytes(both, added), "MB", 6)
    yield from measure_commands(python)


def measure_commands(python: Path) -> Iterator[Figure]:
    """Yield the CPU time of the first commands."""
    command = str(python.with_name("gymsdk"))
    yield Figure("CPU of a bare interpreter", lowest_cpu([str(python), "-c", ""]), "s")
    yield Figure("CPU of import gymsdk", lowest_cpu([str(python), "-c", "import gymsdk"]), "s", 0.2)
    yield Figure("CPU of gymsdk list", lowest_cpu([command, "list"]), "s", 0.5)
    yield Figure("CPU of gymsdk --help", lowest_cpu([command, "--help"]), "s", 0.5)


def install(python: Path, wheels: Path, name: str) -> Inventory:
    """Install the wheel of *name*; return all installed distributions."""
    (wheel,) = wheels.glob(f"{name}-*.whl")
    subprocess.run([python, "-m", "pip", "install", "-qq", wheel], check=True)
    completed = subprocess.run([python, "-c", INVENTORY], check=True, capture_output=True, text=True)
    inventory: Inventory = json.loads(completed.stdout)
    return inventory


def megabytes(inventory: Inventory, names: set[str]) -> float:
    """Return the size on disk of the distributions *names*, in megabytes (10^6 bytes)."""
    return sum(inventory[name]["size"] for name in names) / 1e6


def lowest_cpu(command: list[str], times: int = 7) -> float:
    """Return the lowest CPU time of several runs of *command*, in seconds.

    Other processes on this machine can only add CPU time, so the lowest value is the best estimate.
    """
    return min(measure_run(command) for _ in range(times))


def measure_run(command: list[str]) -> float:
    """Return the CPU time, user and system, of one run in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
