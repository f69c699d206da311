"""Virtual environments with gymsdk installed, as for a user: they contain only files from packages."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import venv
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
KINDS = ["wheel", "editable"] if (ROOT / "gymsdk").is_dir() else ["installed"]
"""The kinds of gymsdk installations; if the sources are not available, only the kind of this interpreter."""

LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "environments", "tests", "docs", "benchmarks")
OURS = ("gymsdk", "gym_env", "_editable", "_distutils", "pip", "setuptools", "__pycache__")


@dataclass(frozen=True)
class Interpreter:
    """The Python interpreter of a virtual environment."""

    home: Path

    @property
    def site(self) -> Path:
        """The site-packages folder."""
        (site,) = self.home.glob("lib/python*/site-packages")
        return site

    def run(self, *arguments: str, path: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the interpreter with *arguments* and with *path* as PYTHONPATH."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GYMSDK"))}
        given = {"PYTHONPATH": str(path)} if path else {}
        command = [self.home / "bin" / "python", *arguments]
        variables = kept | given | variables
        return subprocess.run(command, env=variables, capture_output=True, text=True, cwd=self.home, check=False)

    def says(self, code: str, *flags: str, path: Path | None = None, **variables: str) -> str:
        """Run *code*, which must write nothing to stderr; return its output."""
        ran = self.run(*flags, "-c", code, path=path, **variables)
        assert (ran.returncode, ran.stderr) == (0, "")
        return ran.stdout.strip()


@pytest.fixture(scope="session")
def interpreters(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Interpreter]:
    """Return a function that creates an interpreter with a kind of installation and a few environments, once."""
    folder = tmp_path_factory.mktemp("interpreters")
    return functools.cache(lambda kind: installed(kind, folder))


@pytest.fixture(scope="session")
def interpreter(interpreters: Callable[[str], Interpreter]) -> Interpreter:
    return interpreters(KINDS[0])


@pytest.fixture
def alone(interpreter: Interpreter, tmp_path: Path) -> Interpreter:
    """Return a separate interpreter that the test may break."""
    shutil.copytree(interpreter.home, tmp_path / "alone", symlinks=True)
    return Interpreter(tmp_path / "alone")


def installed(kind: str, folder: Path) -> Interpreter:
    home = folder / kind
    venv.create(home, symlinks=True)
    made = Interpreter(home)
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(OURS) and path.suffix != ".pth":
            (made.site / path.name).symlink_to(path)
    lay(kind, folder, made.site)
    environment(made.site, "alpha")
    environment(made.site, "gone", module="nowhere_to_be_found")
    environment(made.site, "old-v2")
    environment(made.site, "two words")
    environment(made.site, "one:two")
    environment(made.site, "twin", package="one_twin")
    environment(made.site, "twin", package="other_twin")
    return made


def lay(kind: str, folder: Path, site: Path) -> None:
    """Install gymsdk into *site*."""
    if kind != "installed":
        zipfile.ZipFile(built(kind, folder)).extractall(site)
        return
    for file in distribution("gymsdk").files or ():
        if ".." not in file.parts:
            (site / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.locate(), site / file)


def built(kind: str, folder: Path) -> Path:
    """Build the wheel or the editable wheel of gymsdk from a copy of the checkout without environments."""
    from hatchling.builders.wheel import WheelBuilder

    checkout = folder / f"{kind} checkout"
    shutil.copytree(ROOT, checkout, ignore=LEFT_OUT)
    version = "standard" if kind == "wheel" else kind
    return Path(next(WheelBuilder(str(checkout)).build(directory=str(folder / f"{kind}s"), versions=[version])))


def environment(site: Path, name: str, *, module: str | None = None, package: str | None = None) -> None:
    """Install an environment that raises an error on import, so that no import goes unnoticed."""
    package = package or f"env_{name.replace(' ', '_').replace(':', '_').replace('-', '_')}"
    (site / f"{package}.py").write_text("raise RuntimeError('imported')\n")
    about = site / f"{package}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[gymsdk.environments]\n{name} = {module or package}\n")


@pytest.fixture
def add() -> Callable[..., None]:
    """Return a function that installs an environment into a folder."""
    return environment
