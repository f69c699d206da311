"""The weight of an installation: what pip brings, and what the first commands cost in CPU.

usage: weight.py [WHEELS [VENV]]

Installs the wheels in the folder WHEELS (by default they are built from this checkout) into a new virtual environment
at VENV (by default a passing one). Exits with 1 where a limit is exceeded.
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
APART = {"gymnasium", "numpy", "pip", "setuptools"}
"""Distributions that do not count: the two every user of Gymnasium has, and what a virtual environment starts with."""

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
"""Prints the distributions of the interpreter that runs it: bytes on disk, compiled files included, and needs."""


@dataclass(frozen=True)
class Figure:
    """One measurement, with the most it may be where there is a limit."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def kept(self) -> bool:
        """Whether it is within its limit."""
        return self.limit is None or self.value <= self.limit

    def __str__(self) -> str:
        bound = "" if self.limit is None else f" (limit {self.limit:g})"
        return f"{self.name:<52} {self.value:8.3g} {self.unit}{bound}{'' if self.kept else '  EXCEEDED'}"


class Installed(TypedDict):
    """One distribution: its bytes, and the names of what it needs."""

    size: int
    needs: list[str]


Inventory = dict[str, Installed]
"""What is installed, by name."""


def main() -> None:
    """Print every figure."""
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(sys.argv[1]) if len(sys.argv) > 1 else built(Path(scratch, "wheels"))
        home = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(scratch, "venv")
        figures = list(measured(wheels, home))
    print(*figures, "* gymnasium and numpy, which do not count; gymsdk itself does", sep="\n")
    if not all(figure.kept for figure in figures):
        sys.exit(1)


def built(wheels: Path) -> Path:
    """Build the wheels of this checkout into *wheels*."""
    projects = [ROOT, ROOT / "environments" / "math"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", wheels, *projects], check=True)
    return wheels


def measured(wheels: Path, home: Path) -> Iterator[Figure]:
    """Install gymsdk, then gym-env-math, and yield what they weigh."""
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    host = installed(python, wheels, "gymsdk")
    counted = host.keys() - APART
    yield Figure("pip install gymsdk: distributions*", len(counted), "", 42)
    yield Figure("pip install gymsdk: MB*", megabytes(host, counted), "MB", 55)
    yield Figure("pip install gymsdk: distributions with those", len(host.keys() - {"pip", "setuptools"}), "")
    both = installed(python, wheels, "gym_env_math")
    added = both.keys() - host.keys()
    yield Figure("pip install gym-env-math adds: distributions", len(added), "")
    yield Figure("pip install gym-env-math adds: MB", megabytes(both, added), "MB")
    yield Figure("... beyond math-verify and what that needs", len(added - {"gym-env-math"} - needs(both)), "", 0)
    yield from started(python)


def started(python: Path) -> Iterator[Figure]:
    """Yield what the first commands cost."""
    command = str(python.with_name("gymsdk"))
    yield Figure("CPU of a bare interpreter", cpu([str(python), "-c", ""]), "s")
    yield Figure("CPU of import gymsdk", cpu([str(python), "-c", "import gymsdk"]), "s", 0.2)
    yield Figure("CPU of gymsdk list", cpu([command, "list"]), "s", 0.5)
    yield Figure("CPU of gymsdk --help", cpu([command, "--help"]), "s", 0.5)


def installed(python: Path, wheels: Path, name: str) -> Inventory:
    """Install the wheel of *name* and give what is there then."""
    (wheel,) = wheels.glob(f"{name}-*.whl")
    subprocess.run([python, "-m", "pip", "install", "-qq", wheel], check=True)
    told = subprocess.run([python, "-c", INVENTORY], check=True, capture_output=True, text=True)
    inventory: Inventory = json.loads(told.stdout)
    return inventory


def megabytes(inventory: Inventory, names: set[str]) -> float:
    """Give the megabytes (10^6 bytes) on disk of the distributions *names*."""
    return sum(inventory[name]["size"] for name in names) / 1e6


def needs(inventory: Inventory, name: str = "math-verify") -> set[str]:
    """Give *name* and everything it needs, of what is installed."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        one = waiting.pop()
        if one in inventory and one not in found:
            found.add(one)
            waiting += inventory[one]["needs"]
    return found


def cpu(command: list[str], times: int = 7) -> float:
    """Give the CPU seconds of *command*, the least of several runs: whatever else runs here only adds."""
    return min(spent(command) for _ in range(times))


def spent(command: list[str]) -> float:
    """Give the CPU seconds, user's and system's, of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
