"""What is shipped: the files an installed distribution brings, or those of the wheel its project builds."""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
import tomllib
import zipfile
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

from gymsdk.checks import interpreter
from gymsdk.checks.check import NotApplicable

SECONDS = 90.0
"""Seconds a build may take."""

TIDY = ("hatchling", "flit_core", "poetry.core", "uv_build", "pdm.backend")
"""Backends that leave nothing in the project they build; others are given a copy of it."""

LEFT = shutil.ignore_patterns(".git", ".venv*", "venv", "__pycache__", ".*_cache", "build", "dist", "node_modules")

PROGRAM = """
import importlib, json, re, sys
from importlib.metadata import distribution
asked = json.load(sys.stdin)
sys.path[:0] = asked["path"]
module, _, attribute = asked["backend"].partition(":")
backend = importlib.import_module(module)
for name in filter(None, attribute.split(".")):
    backend = getattr(backend, name)
for each in [*asked["requires"], *getattr(backend, "get_requires_for_build_wheel", list)()]:
    if ";" not in each:
        distribution(re.match(r"[\\w.-]+", each)[0])
backend.build_wheel(asked["target"])
"""

MISSING = ("ModuleNotFoundError", "ImportError", "importlib.metadata.PackageNotFoundError")
"""How the last line of a build begins that lacks something it requires."""


class NotBuilt(Exception):
    """The project's wheel cannot be built; the message is the backend's last line."""


async def files(distribution: Distribution, top: str) -> set[str]:
    """Give the paths of what *distribution*, whose module is *top*, ships, from the folder it is installed into.

    Raises `NotApplicable` where that cannot be known here, `NotBuilt` where its project builds no wheel.
    """
    project = edited(distribution, top)
    if project is not None:
        return await built(project, distribution.version)
    held = distribution.files
    if held is None:
        raise NotApplicable("it was installed without a list of its files")
    return {path.as_posix() for path in held}


def edited(distribution: Distribution, top: str) -> Path | None:
    """Give the project of an editable install, `None` for any other."""
    told = json.loads(distribution.read_text("direct_url.json") or "{}")
    if told.get("dir_info", {}).get("editable"):
        return Path(unquote(urlparse(told["url"]).path))
    # A build hook may install another project's editable wheel, whose address is that of an archive.
    home = Path(str(distribution.locate_file(""))).resolve()
    folders = [path.resolve() for path in present(top)]
    if not folders or home in folders[0].parents:
        return None
    return next((each for each in folders[0].parents if (each / "pyproject.toml").is_file()), None)


def present(top: str) -> list[Path]:
    """Give where the module or package *top* lies: its folders, or its file."""
    spec = find_spec(top)
    if spec is None:
        return []
    return [Path(each) for each in spec.submodule_search_locations or filter(None, [spec.origin])]


async def built(project: Path, version: str) -> set[str]:
    """Give the paths in the wheel that *project*'s own backend builds, without network and beside the project."""
    try:
        system = tomllib.loads((project / "pyproject.toml").read_text()).get("build-system", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise NotBuilt(f"pyproject.toml cannot be read: {error}") from None
    backend = system.get("build-backend", "setuptools.build_meta:__legacy__")
    top = backend.partition(":")[0].split(".")[0]
    if not system.get("backend-path") and find_spec(top) is None:
        raise NotApplicable(
            f"its build backend {top!r} is not installed here, so no wheel can be built; {_install(system, top)}"
        )
    with tempfile.TemporaryDirectory(prefix="gymsdk-wheel-") as folder:
        source = project
        if not backend.startswith(TIDY):
            source = Path(shutil.copytree(project, Path(folder) / "source", ignore=LEFT))
        target = Path(tempfile.mkdtemp(dir=folder))
        asked = {
            "backend": backend,
            "path": system.get("backend-path", []),
            "requires": system.get("requires", []),
            "target": str(target),
        }
        await _build(source, asked, version, _install(system, top))
        return _held(target)


def _install(system: dict[str, list[str]], top: str) -> str:
    """Give the command that brings what a build requires."""
    return f"`pip install {shlex.join(system.get('requires') or [top])}` brings it"


def _held(folder: Path) -> set[str]:
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


async def _build(source: Path, asked: dict[str, object], version: str, install: str) -> None:
    # The copy has no history to read a version from.
    version_of = {"SETUPTOOLS_SCM_PRETEND_VERSION": version}
    question = json.dumps(asked).encode()
    ended = await interpreter.run(PROGRAM, seconds=SECONDS, given=question, environment=version_of, folder=source)
    if ended.code:
        if ended.last.startswith(MISSING):
            raise NotApplicable(f"something its build needs is not installed here: {ended.last}; {install}")
        raise NotBuilt(ended.last)
