"""Checks of the package of an environment: its metadata, its files, and the cost of importing it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlparse

from pydantic import BaseModel

from gymsdk.checks import determinism
from gymsdk.checks.report import Check, Finding, NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.plugins.registry import Entry

BUILD_SECONDS = 90.0
"""Time limit of a build."""

OFFLINE_BACKENDS = ("hatchling", "flit_core", "poetry.core", "uv_build", "pdm.backend")
"""Build backends that leave no files in the project. Other backends build a copy of the project."""

IGNORED_PATTERNS = shutil.ignore_patterns(
    ".git", ".venv*", "venv", "__pycache__", ".*_cache", "build", "dist", "node_modules"
)

BUILD_PROGRAM = """
import importlib, json, re, sys
from importlib.metadata import distribution
request = json.load(sys.stdin)
sys.path[:0] = request["path"]
module, _, attribute = request["backend"].partition(":")
backend = importlib.import_module(module)
for name in filter(None, attribute.split(".")):
    backend = getattr(backend, name)
for requirement in [*request["requires"], *getattr(backend, "get_requires_for_build_wheel", list)()]:
    if ";" not in requirement:
        distribution(re.match(r"[\\w.-]+", requirement)[0])
backend.build_wheel(request["target"])
"""

MISSING_REQUIREMENT_ERRORS = ("ModuleNotFoundError", "ImportError", "importlib.metadata.PackageNotFoundError")
"""How the last line of a build begins if a requirement is missing."""

IMPORT_SECONDS = 45.0
"""Time limit of the import."""

IMPORT_PROGRAM = """
import json, os, sys, tempfile, threading, time
import gymsdk
for name in gymsdk.__all__:
    getattr(gymsdk, name)
import importlib
from gymsdk.checks.generators import read_generator_states
try:
    import numpy.random
except ImportError:
    pass
report, errors = os.fdopen(os.dup(1), "w"), os.dup(2)
printed = tempfile.TemporaryFile()
os.dup2(printed.fileno(), 1)
os.dup2(printed.fileno(), 2)
states = read_generator_states()
loaded_before, cpu_start, wall_start = set(sys.modules), time.process_time(), time.monotonic()
try:
    importlib.import_module(sys.argv[1])
except BaseException as error:
    os.dup2(errors, 2)
    if isinstance(error, SyntaxError):
        sys.exit(f"SyntaxError: {error.msg} ({error.filename}:{error.lineno})")
    raise
cpu, wall = time.process_time() - cpu_start, time.monotonic() - wall_start
for stream in (sys.stdout, sys.stderr):
    stream.flush()
printed.seek(0)
states_after = read_generator_states()
json.dump({
    "cpu": cpu,
    "wall": wall,
    "modules": sorted({name.split(".")[0] for name in set(sys.modules) - loaded_before}),
    "threads": [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()],
    "printed": printed.read().decode(errors="replace").strip(),
    "changed": [name for name, state in states.items() if states_after[name] != state],
}, report)
report.flush()
os._exit(0)
"""
"""It writes the report to a descriptor that only it knows, because the environment may print, also when it exits."""

IMPORT_CPU_SECONDS = 2.0
"""Seconds of CPU an import may cost."""

IMPORT_WALL_SECONDS = 3.0
"""Seconds an import may take if it mostly waits."""

BUSY_SHARE = 0.25
"""An import that uses the CPU for a smaller share of its wall-clock time than this waits for something."""

FIX_WAITING = "do not wait at import: open connections and read files in `lifespan` or where they are needed"

HEAVY_MODULES = frozenset({"torch", "tensorflow", "jax", "transformers", "vllm", "ray"})
"""Packages that cost every command seconds if a module imports them at its top level."""

STRAY_MODULES = frozenset(
    {"tests", "test", "docs", "doc", "examples", "benchmarks", "scripts", "build", "dist", "data"}
)
"""Names of folders that must not be installed beside a package, because other packages use them too."""

MIN_README_CHARS = 80
"""The minimum length of a README."""

MAX_LISTED_FILES = 5
"""How many missing files a finding names."""


class BuildFailed(Exception):
    """The project's wheel cannot be built; the message is the last line of the backend."""


async def list_files(distribution: Distribution, top: str) -> set[str]:
    """Return the paths of the files that *distribution* with the module *top* ships, relative to where it is installed.

    Raises:
        NotApplicable: The files cannot be determined on this machine.
        BuildFailed: The wheel of the project cannot be built.
    """
    project = find_editable_project(distribution, top)
    if project is not None:
        return await list_wheel_files(project, distribution.version)
    installed = distribution.files
    if installed is None:
        raise NotApplicable("it was installed without a list of its files")
    return {path.as_posix() for path in installed}


def find_editable_project(distribution: Distribution, top: str) -> Path | None:
    """Return the project folder of an editable install, or `None`."""
    direct_url = json.loads(distribution.read_text("direct_url.json") or "{}")
    if direct_url.get("dir_info", {}).get("editable"):
        return Path(unquote(urlparse(direct_url["url"]).path))
    # A build hook may install another project's editable wheel, whose URL is that of an archive.
    home = Path(str(distribution.locate_file(""))).resolve()
    folders = [path.resolve() for path in find_module_paths(top)]
    if not folders or home in folders[0].parents:
        return None
    return next((parent for parent in folders[0].parents if (parent / "pyproject.toml").is_file()), None)


def find_module_paths(top: str) -> list[Path]:
    """Return the folders of the package *top*, or its file."""
    spec = find_spec(top)
    if spec is None:
        return []
    return [Path(location) for location in spec.submodule_search_locations or filter(None, [spec.origin])]


async def list_wheel_files(project: Path, version: str) -> set[str]:
    """Return the paths in the wheel that *project*'s own backend builds, without network access."""
    try:
        system = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8")).get("build-system", {})
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise BuildFailed(f"cannot read pyproject.toml: {error}") from None
    backend = system.get("build-backend", "setuptools.build_meta:__legacy__")
    top = backend.partition(":")[0].split(".")[0]
    if not system.get("backend-path") and find_spec(top) is None:
        raise NotApplicable(
            f"its build backend {top!r} is not installed, so no wheel can be built;"
            f" {_format_install_command(system, top)}"
        )
    with tempfile.TemporaryDirectory(prefix="gymsdk-wheel-") as folder:
        source = project
        # The other backends write into the folder that they build.
        if not backend.startswith(OFFLINE_BACKENDS):
            source = Path(shutil.copytree(project, Path(folder) / "source", ignore=IGNORED_PATTERNS))
        target = Path(tempfile.mkdtemp(dir=folder))
        request = {
            "backend": backend,
            "path": system.get("backend-path", []),
            "requires": system.get("requires", []),
            "target": str(target),
        }
        await _build_wheel(source, request, version, _format_install_command(system, top))
        return _list_folder(target)


def _format_install_command(system: dict[str, list[str]], top: str) -> str:
    """Return the command that installs the requirements of a build."""
    return f"`pip install {shlex.join(system.get('requires') or [top])}` installs it"


def _list_folder(folder: Path) -> set[str]:
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


async def _build_wheel(source: Path, request: dict[str, object], version: str, install: str) -> None:
    # The copy has no version control history to derive a version from.
    build_variables = {"SETUPTOOLS_SCM_PRETEND_VERSION": version}
    request_json = json.dumps(request).encode()
    result = await determinism.run_program(
        BUILD_PROGRAM, seconds=BUILD_SECONDS, stdin=request_json, environment=build_variables, folder=source
    )
    if result.code:
        if result.last_error_line.startswith(MISSING_REQUIREMENT_ERRORS):
            raise NotApplicable(f"a requirement of its build is not installed: {result.last_error_line}; {install}")
        raise BuildFailed(result.last_error_line)


class ImportEffects(BaseModel):
    """The effects of an import: seconds of CPU and of wall-clock time, modules, threads, text, changed generators."""

    cpu: float = 0.0
    wall: float = 0.0
    modules: list[str] = []
    threads: list[str] = []
    printed: str = ""
    changed: list[str] = []


async def measure_import(module: str) -> ImportEffects:
    """Measure the cost of importing *module* in a new process that has imported gymsdk already.

    Raises:
        ImportError: The import fails; the message is the last line of its traceback.
        TimeoutError: The import does not end within `IMPORT_SECONDS`.
    """
    result = await determinism.run_program(IMPORT_PROGRAM, module, seconds=IMPORT_SECONDS)
    if result.code:
        raise ImportError(result.last_error_line)
    if not result.output:
        raise ImportError("it ends the process")
    return ImportEffects.model_validate_json(result.output)


def _get_entry(subject: Subject) -> Entry:
    if subject.entry is None:
        raise NotApplicable("it is not installed")
    return subject.entry


def _get_distribution(subject: Subject) -> Distribution:
    entry = _get_entry(subject)
    try:
        return distribution(entry.distribution)
    except (PackageNotFoundError, ValueError):
        raise NotApplicable(f"the metadata of {entry.distribution!r} cannot be found") from None


def _read_metadata(installed: Distribution) -> Message:
    # `importlib.metadata` types this as a protocol without `items`.
    from email import message_from_string

    return message_from_string(installed.read_text("METADATA") or installed.read_text("PKG-INFO") or "")


async def _check_metadata(subject: Subject) -> list[Finding]:
    metadata = _read_metadata(_get_distribution(subject))
    required_fields = {
        "Name": "`name`",
        "Version": "`version`",
        "Summary": "`description`, a sentence for `gymsdk list`",
        "Requires-Python": "`requires-python`",
    }
    findings = [
        Finding(problem=f"it lacks {words}")
        for field, words in required_fields.items()
        if metadata.get(field, "").strip() in {"", "UNKNOWN"}
    ]
    required = {
        re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()
        for requirement in metadata.get_all("Requires-Dist", [])
    }
    if "gymsdk" not in required:
        findings.append(Finding(problem="it does not depend on `gymsdk`", fix='add `dependencies = ["gymsdk"]`'))
    return findings


async def _check_readme_and_licence(subject: Subject) -> list[Finding]:
    metadata = _read_metadata(_get_distribution(subject))
    findings = []
    if not any(map(metadata.get_all, ("License-Expression", "License", "License-File"))) and not any(
        classifier.startswith("License ::") for classifier in metadata.get_all("Classifier", [])
    ):
        findings.append(Finding(problem="it does not name a licence", fix='add `license = "…"` to pyproject.toml'))
    page = str(metadata.get_payload() or metadata.get("Description", ""))
    if len(page.strip()) < MIN_README_CHARS:
        text = f"its README has {len(page.strip())} characters" if page.strip() else "it has no README"
        findings.append(Finding(problem=text, fix='write one and add `readme = "README.md"` to pyproject.toml'))
    return findings


async def _check_entry_point(subject: Subject) -> list[Finding]:
    entry = _get_entry(subject)
    if entry.error:
        return [Finding(problem=entry.error)]
    top = re.split(r"[.:\[\s]", entry.module)[0]
    if top in sys.stdlib_module_names | {"gymsdk", "gymnasium"}:
        return [Finding(problem=f"its module {top!r} shadows another package", fix="name the package `gym_env_<name>`")]
    return []


async def _check_files(subject: Subject) -> list[Finding]:
    home, top = _get_distribution(subject), re.split(r"[.:\[\s]", _get_entry(subject).module)[0]
    try:
        shipped = await list_files(home, top)
    except BuildFailed as error:
        return [
            Finding(problem=f"its wheel cannot be built: {error}", fix="run `pip wheel --no-deps .` and fix the error")
        ]
    findings = []
    if missing := sorted(set(_iter_source_files(top)) - shipped):
        omitted = len(missing) - MAX_LISTED_FILES
        listed = ", ".join(missing[:MAX_LISTED_FILES]) + (f" and {omitted} more" if omitted > 0 else "")
        findings.append(Finding(problem=f"not shipped: {listed}"))
    if stray := sorted(_list_strays(shipped)):
        findings.append(
            Finding(problem=f"it ships {', '.join(stray)} beside the package", fix="ship the package alone")
        )
    return findings


def _iter_source_files(top: str) -> Iterator[str]:
    """Yield the files of the package on disk, except caches and files that only its tests need."""
    for folder in find_module_paths(top):
        if folder.is_file():
            yield folder.name
        for path in folder.rglob("*"):
            inside = path.relative_to(folder.parent)
            is_excluded = any(part.startswith(".") or part in {"__pycache__", "tests"} for part in inside.parts)
            if path.is_file() and not is_excluded and path.suffix not in {".pyc", ".md"}:
                yield inside.as_posix()


def _list_strays(shipped: set[str]) -> Iterator[str]:
    # The wheel lists scripts as `../../bin/…`.
    top_names = {path.split("/")[0] for path in shipped if not path.startswith((".", "/"))}
    for name in top_names:
        alone = name in shipped
        if name in STRAY_MODULES or (
            alone and (name in {"conftest.py", "setup.py"} or not name.endswith((".py", ".pth")))
        ):
            yield name


async def check_import(subject: Subject, *, cpu: float = IMPORT_CPU_SECONDS) -> list[Finding]:
    """Check the import of the package: whether it prints, starts threads, loads heavy packages or costs too much."""
    module = _get_entry(subject).module.split(":")[0].split("[")[0].strip()
    try:
        effects = await measure_import(module)
    except ImportError as error:
        return [Finding(problem=f"it cannot be imported: {error}", fix="fix the import first")]
    except TimeoutError:
        return [Finding(problem=f"its import did not end within {IMPORT_SECONDS:g} s", fix=FIX_WAITING)]
    return [Finding(problem=cost) for cost in _list_import_costs(effects, cpu)]


def _list_import_costs(effects: ImportEffects, cpu: float) -> Iterator[str]:
    heavy = sorted(HEAVY_MODULES & set(effects.modules))
    if heavy:
        yield f"its import loads {', '.join(heavy)}"
    if effects.cpu > cpu:
        yield f"its import costs {effects.cpu:.1f} s of CPU, more than the allowed {cpu:g}"
    # A slow import on a busy machine is not the package's fault; one that leaves the CPU idle is.
    if effects.wall > IMPORT_WALL_SECONDS and effects.cpu < BUSY_SHARE * effects.wall:
        yield f"its import takes {effects.wall:.1f} s but computes for only {effects.cpu:.1f} s: it waits for something"
    if effects.printed:
        yield f"its import prints {effects.printed[:120]!r}"
    for state in effects.changed:
        yield f"its import changes {state}"
    if effects.threads:
        yield f"its import starts the threads {', '.join(effects.threads)}"


CHECKS: tuple[Check, ...] = (
    Check(
        id="packaging.metadata",
        requirement="the package declares its name, version, summary and Python version, and depends on gymsdk",
        why="`gymsdk list` shows its metadata, and `pip install` installs its dependencies",
        fix="complete `[project]` in pyproject.toml and install it again",
        run=_check_metadata,
        loads=False,
    ),
    Check(
        id="packaging.page",
        requirement="the package has a README and names its licence",
        why="a package without a licence may not be used, and one without an explanation is not used",
        fix="add both to `[project]` in pyproject.toml and install it again",
        run=_check_readme_and_licence,
        loads=False,
    ),
    Check(
        id="packaging.entry_point",
        requirement="its entry point has a valid and unique name and refers to an existing module",
        why="commands and `gymnasium.make` find an environment by this name alone",
        fix='correct `[project.entry-points."gymsdk.environments"]` in pyproject.toml and install it again',
        run=_check_entry_point,
        loads=False,
    ),
    Check(
        id="packaging.files",
        requirement="the wheel contains every module and data file of the package, and nothing else",
        why="a file that is in the project's folder but not in the wheel is missing for every user",
        fix="include the files in the build backend's settings; check whether `.gitignore` excludes them",
        run=_check_files,
        loads=False,
    ),
    Check(
        id="packaging.import",
        requirement="importing it is cheap, prints nothing and starts nothing",
        why="every command, worker and server imports it, often many times",
        fix="import heavy packages inside the function that needs them; open resources in `lifespan`",
        run=check_import,
        loads=False,
    ),
)
