"""The cost of the start-up hook: what it adds to every interpreter's start, and to `import gymnasium`.

usage: startup.py [STARTS]

Builds the wheels of this checkout, lays them into two virtual environments beside the third parties installed here, one
of them without the start-up line, and takes turns between the two: STARTS of them bare, a tenth with the import.
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
"""The most milliseconds of CPU that the hook may add to an interpreter's start."""


def main() -> None:
    """Print every figure."""
    starts = int(sys.argv[1]) if len(sys.argv) > 1 else 400
    with tempfile.TemporaryDirectory() as scratch:
        hooked, bare = interpreters(Path(scratch))
        added = compared("an interpreter's start", "", starts, hooked, bare)
        compared("import gymnasium, 3 environments", "import gymnasium", starts // 10, hooked, bare)
    sys.exit(added > LIMIT)


def interpreters(folder: Path) -> tuple[Path, Path]:
    """Give a Python with the hook and one without its line."""
    projects = [ROOT, *(path.parent for path in ROOT.glob("environments/*/pyproject.toml"))]
    command = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "-w", folder / "wheels", *projects], check=True)
    hooked, bare = (laid(folder / name, folder / "wheels") for name in ("hooked", "bare"))
    (site(bare) / "gymsdk_startup.pth").unlink()
    return hooked / "bin" / "python", bare / "bin" / "python"


def laid(home: Path, wheels: Path) -> Path:
    """Make the virtual environment *home* of the wheels and of what is installed here, compiled as pip compiles."""
    venv.create(home, symlinks=True)
    for wheel in wheels.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(site(home))
    subprocess.run([home / "bin" / "python", "-m", "compileall", "-q", site(home)], check=True)
    for each in Path(sysconfig.get_path("purelib")).iterdir():
        if not each.name.startswith(OURS) and each.suffix != ".pth" and each.name != "__pycache__":
            (site(home) / each.name).symlink_to(each)
    return home


def site(home: Path) -> Path:
    """Give where the packages of a virtual environment are."""
    (found,) = home.glob("lib/python*/site-packages")
    return found


def compared(what: str, code: str, times: int, hooked: Path, bare: Path) -> float:
    """Print the median CPU of *code* with the hook, switched off, and without; give the milliseconds the hook adds."""
    turns: list[tuple[str, Path, dict[str, str]]] = [
        ("with the hook", hooked, {}),
        ("GYMSDK_NO_AUTOREGISTER=1", hooked, OFF),
        ("without its line", bare, {}),
    ]
    taken = [[spent(python, code, variables) for _, python, variables in turns] for _ in range(times)]
    medians = [median(column) for column in zip(*taken, strict=True)]
    added = [median(run[column] - run[-1] for run in taken) for column in range(len(turns))]
    print(f"{what}: medians of {times} alternating runs, CPU")
    for (name, _, _), cost, more in zip(turns, medians, added, strict=True):
        print(f"  {name:<26} {cost:8.3f} ms  {more:+7.3f} ms")
    return added[0]


def spent(python: Path, code: str, variables: dict[str, str]) -> float:
    """Give the milliseconds of CPU, user's and system's, of one run."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GYMSDK"))}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([python, "-c", code], check=True, env=kept | variables)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


if __name__ == "__main__":
    main()
