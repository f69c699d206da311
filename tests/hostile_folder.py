"""A folder with files of another person: each module has the name of a module that Python or gymsdk imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path

OWN = {"gymsdk", "gymsdk_nemo_compat", "gymsdk_startup", "nemo_gym", "gym_env_math", "gym_env_tool_call"}
SITE = {"sitecustomize", "usercustomize", "evil"}


def list_module_names() -> set[str]:
    """Return the names of all modules of the standard library, of all installed packages, and of our own."""
    names = {*sys.stdlib_module_names, *packages_distributions(), *OWN, *SITE}
    return {name for name in names if name.isidentifier()}


@dataclass(frozen=True)
class HostileFolder:
    """The folder, and the file in which its modules record that they were imported."""

    path: Path
    marker: Path

    def list_imported(self) -> list[str]:
        """Return the names of the modules that any process imported from the folder."""
        return sorted(set(self.marker.read_text().split())) if self.marker.exists() else []

    def run(self, *command: str, seconds: float = 120, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run *command* in the folder."""
        return subprocess.run(
            command,
            cwd=self.path,
            env=get_variables() | variables,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )


def get_variables() -> dict[str, str]:
    """Return the environment variables without those that change the folders of Python's imports."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}


def build_hostile_folder(folder: Path, *, without: Collection[str] = ()) -> HostileFolder:
    """Write a module of each name of `list_module_names`, except those *without*, and the metadata of a package.

    Each module records its name and has no content, as an innocent file of this name.
    """
    found = HostileFolder(folder / "download", folder / "imported")
    found.path.mkdir(parents=True)
    packages = {"gymsdk", "json", "asyncio", "ray"}
    for name in list_module_names() - {*without}:
        path = found.path / (f"{name}/__init__.py" if name in packages else f"{name}.py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"open({str(found.marker)!r}, 'a').write({name!r} + '\\n')\n")
    about = found.path / "evil-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[gymsdk.environments]\nevil = evil\n")
    return found


def read_ready_line(process: subprocess.Popen[str]) -> dict[str, object]:
    """Return the JSON line that a server prints when it is ready; an empty object if it ends before."""
    assert process.stdout is not None
    line = process.stdout.readline()
    ready: dict[str, object] = json.loads(line) if line.startswith("{") else {}
    return ready


def find_script(name: str) -> str:
    """Return the path of the console script *name* of this environment."""
    return str(Path(sys.executable).with_name(name))


def start(folder: HostileFolder, command: Sequence[str]) -> subprocess.Popen[str]:
    """Start *command* in the folder with pipes."""
    return subprocess.Popen(
        command,
        cwd=folder.path,
        env=get_variables(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
