"""Measure the CPU time that the start-up hook adds to interpreter start and to `import gymnasium`.

usage: startup.py [STARTS]

The script builds the wheels of this checkout and installs them into two virtual environments, together with the
third-party packages of this interpreter. One of the environments does not have the start-up line. The runs alternate
between the two: STARTS runs of an empty program, and a tenth as many of `import gymnasium`.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
OURS = ("gymsdk", "gym_env", "_editable", "_distutils", "pip", "setuptools")
OFF = {"GYMSDK_NO_AUTOREGISTER": "1"}
LIMIT = 1.0
"""Maximum CPU time that the hook may add to interpreter start, in milliseconds."""


def main() -> None:
    """Print all measurements."""
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    with tempfile.TemporaryDirectory() as scratch:
        hooked, bare = build_interpreters(Path(scratch))
        added = compare("interpreter start", "", starts, hooked, bare)
        compare("import gymnasium, 3 environments", "import gymnasium", starts // 10, hooked, bare)
    sys.exit(added > LIMIT)


def build_interpreters(folder: Path) -> tuple[Path, Path]:
    """Return a Python interpreter with the start-up hook and an interpreter without the hook."""
    projects = [ROOT, *(path.parent for path in ROOT.glob("environments/*/pyproject.toml"))]
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder / "wheels", *projects], check=True)
    hooked, bare = (create_venv(folder / name, folder / "wheels") for name in ("hooked", "bare"))
    (site_packages(bare) / "gymsdk_startup.pth").unlink()
    return hooked / "bin" / "python", bare / "bin" / "python"


def create_venv(home: Path, wheels: Path) -> Path:
    """Create the virtual environment *home* from the wheels and the installed packages, with compiled modules."""
    venv.create(home, symlinks=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site_packages(home))
    subprocess.run([home / "bin" / "python", "-m", "compileall", "-q", site_packages(home)], check=True)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(OURS) and path.suffix != ".pth" and path.name != "__pycache__":
            (site_packages(home) / path.name).symlink_to(path)
    return home


def site_packages(home: Path) -> Path:
    """Return the site-packages folder of a virtual environment."""
    (found,) = home.glob("lib/python*/site-packages")
    return found


def compare(label: str, code: str, times: int, hooked: Path, bare: Path) -> float:
    """Print the median CPU time of *code* with the hook, with the hook disabled, and without the hook.

    Returns:
        The CPU time that the hook adds, in milliseconds.
    """
    variants: list[tuple[str, Path, dict[str, str]]] = [
        ("with the hook", hooked, {}),
        ("GYMSDK_NO_AUTOREGISTER=1", hooked, OFF),
        ("without its line", bare, {}),
    ]
    runs = [[measure_cpu(python, code, variables) for _, python, variables in variants] for _ in range(times)]
    medians = [median(column) for column in zip(*runs, strict=True)]
    added = [median(run[column] - run[-1] for run in runs) for column in range(len(variants))]
    print(f"{label}: medians of {times} alternating runs, CPU")
    for (name, _, _), cost, more in zip(variants, medians, added, strict=True):
        print(f"  {name:<26} {cost:8.3f} ms  {more:+7.3f} ms")
    return added[0]


def measure_cpu(python: Path, code: str, variables: dict[str, str]) -> float:
    """Return the CPU time, user and system, of one run in milliseconds."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GYMSDK"))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-c", code], check=True, env=environ | variables)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


if __name__ == "__main__":
    main()
