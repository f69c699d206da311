"""Checks of the package an environment is installed as: what it says of itself, ships, and does when imported."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from email.message import Message
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from gymsdk.checks import importing, shipped
from gymsdk.checks.check import Check, Finding, NotApplicable
from gymsdk.checks.subject import Subject
from gymsdk.plugins.registry import Entry

CPU = 2.0
"""Seconds of CPU an import may cost."""

WALL = 3.0
"""Seconds an import may wait for what is no computing of its own."""

BUSY = 0.25
"""The share of its time that an import computes which waits for nothing, be the machine as busy as it may."""

WAITS = "wait for nothing at import: open connections and read files in `lifespan` or where they are needed"

HEAVY = frozenset({"torch", "tensorflow", "jax", "transformers", "vllm", "ray"})
"""Packages that cost every command seconds where a module imports them at its top."""

STRAY = frozenset({"tests", "test", "docs", "doc", "examples", "benchmarks", "scripts", "build", "dist", "data"})
"""Folders that have no place beside a package, where they would be anybody's."""

PAGE = 80
"""Characters a README has at least."""


def _entry(subject: Subject) -> Entry:
    if subject.entry is None:
        raise NotApplicable("it is not installed")
    return subject.entry


def _distribution(subject: Subject) -> Distribution:
    entry = _entry(subject)
    try:
        return distribution(entry.distribution)
    except (PackageNotFoundError, ValueError):
        raise NotApplicable(f"the metadata of {entry.distribution!r} cannot be found") from None


def _told(home: Distribution) -> Message:
    # What `importlib.metadata` types is a protocol without `items`.
    from email import message_from_string

    return message_from_string(home.read_text("METADATA") or home.read_text("PKG-INFO") or "")


async def _metadata(subject: Subject) -> list[Finding]:
    told = _told(_distribution(subject))
    wanted = {
        "Name": "`name`",
        "Version": "`version`",
        "Summary": "`description`, a sentence for `gymsdk list`",
        "Requires-Python": "`requires-python`",
    }
    found = [Finding(seen=f"it has no {words}") for field, words in wanted.items() if not _given(told, field)]
    required = {re.split(r"[^\w.-]", each, maxsplit=1)[0].lower() for each in told.get_all("Requires-Dist", [])}
    if "gymsdk" not in required:
        found.append(Finding(seen="it does not depend on `gymsdk`", mend='add `dependencies = ["gymsdk"]`'))
    return found


def _given(told: Message, field: str) -> bool:
    return told.get(field, "").strip() not in {"", "UNKNOWN"}


async def _page(subject: Subject) -> list[Finding]:
    told = _told(_distribution(subject))
    found = []
    if not any(map(told.get_all, ("License-Expression", "License", "License-File"))) and not any(
        each.startswith("License ::") for each in told.get_all("Classifier", [])
    ):
        found.append(Finding(seen="it names no licence", mend='add `license = "…"` to pyproject.toml'))
    page = str(told.get_payload() or told.get("Description", ""))
    if len(page.strip()) < PAGE:
        seen = f"its README has {len(page.strip())} characters" if page.strip() else "it has no README"
        found.append(Finding(seen=seen, mend='write one and add `readme = "README.md"` to pyproject.toml'))
    return found


async def _point(subject: Subject) -> list[Finding]:
    entry = _entry(subject)
    if entry.error:
        return [Finding(seen=entry.error)]
    top = re.split(r"[.:\[\s]", entry.module)[0]
    if top in sys.stdlib_module_names | {"gymsdk", "gymnasium"}:
        return [Finding(seen=f"its module {top!r} has the name of another's", mend="name the package `gym_env_<name>`")]
    return []


async def _files(subject: Subject) -> list[Finding]:
    home, top = _distribution(subject), re.split(r"[.:\[\s]", _entry(subject).module)[0]
    try:
        held = await shipped.files(home, top)
    except shipped.NotBuilt as error:
        return [Finding(seen=f"its wheel cannot be built: {error}", mend="run `pip wheel --no-deps .` and mend that")]
    found = []
    if missing := sorted(set(_present(top)) - held):
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")  # noqa: PLR2004
        found.append(Finding(seen=f"not shipped: {listed}"))
    if stray := sorted(_strays(held)):
        found.append(Finding(seen=f"beside the package it ships {', '.join(stray)}", mend="ship the package alone"))
    return found


def _present(top: str) -> Iterator[str]:
    """Yield the files of the package as they lie here, without what a run leaves and what only its tests need."""
    for folder in shipped.present(top):
        if folder.is_file():
            yield folder.name
        for path in folder.rglob("*"):
            inside = path.relative_to(folder.parent)
            passing = any(part.startswith(".") or part in {"__pycache__", "tests"} for part in inside.parts)
            if path.is_file() and not passing and path.suffix not in {".pyc", ".md"}:
                yield inside.as_posix()


def _strays(held: set[str]) -> Iterator[str]:
    # Scripts are listed as `../../bin/…`.
    tops = {path.split("/")[0] for path in held if not path.startswith((".", "/"))}
    for name in tops:
        alone = name in held
        if name in STRAY or (alone and (name in {"conftest.py", "setup.py"} or not name.endswith((".py", ".pth")))):
            yield name


async def imported(subject: Subject, *, cpu: float = CPU) -> list[Finding]:
    """Give how importing the package is a burden: what it prints, starts and brings, or costs beyond *cpu* seconds."""
    module = _entry(subject).module.split(":")[0].split("[")[0].strip()
    try:
        seen = await importing.watched(module)
    except ImportError as error:
        return [Finding(seen=f"it cannot be imported: {error}", mend="mend that first")]
    except TimeoutError:
        return [Finding(seen=f"its import was not over after {importing.SECONDS:g} s", mend=WAITS)]
    return [Finding(seen=each) for each in _burdens(seen, cpu)]


def _burdens(seen: importing.Seen, cpu: float) -> Iterator[str]:
    heavy = sorted(HEAVY & set(seen.modules))
    if heavy:
        yield f"its import brings {', '.join(heavy)} along"
    if seen.cpu > cpu:
        yield f"its import costs {seen.cpu:.1f} s of CPU; {cpu:g} are enough"
    if seen.wall > WALL and seen.cpu < BUSY * seen.wall:
        yield f"its import takes {seen.wall:.1f} s, and computes {seen.cpu:.1f} s of them: it waits for something"
    if seen.printed:
        yield f"its import prints {seen.printed[:120]!r}"
    if seen.threads:
        yield f"its import starts the threads {', '.join(seen.threads)}"


CHECKS: tuple[Check, ...] = (
    Check(
        id="packaging.metadata",
        asks="the package says its name, version, what it is, which Python it needs, and that it depends on gymsdk",
        why="`gymsdk list` shows what it says, and `pip install` brings what it depends on",
        mend="complete `[project]` in pyproject.toml and install it again",
        run=_metadata,
        loads=False,
    ),
    Check(
        id="packaging.page",
        asks="the package has a README and names its licence",
        why="nobody may use what has no licence, or will use what explains nothing",
        mend="add both to `[project]` in pyproject.toml and install it again",
        run=_page,
        loads=False,
    ),
    Check(
        id="packaging.entry_point",
        asks="its entry point has a name that can be used and that no other has, and a module that is there",
        why="commands and `gymnasium.make` find an environment by that name alone",
        mend='mend `[project.entry-points."gymsdk.environments"]` in pyproject.toml and install it again',
        run=_point,
        loads=False,
    ),
    Check(
        id="packaging.files",
        asks="the wheel holds every module and data file of the package, and nothing beside it",
        why="what works in the project's folder and is not in the wheel breaks for everybody else",
        mend="include the files in the build backend's settings; look whether `.gitignore` leaves them out",
        run=_files,
        loads=False,
    ),
    Check(
        id="packaging.import",
        asks="importing it is cheap, prints nothing and starts nothing",
        why="every command, worker and server imports it, often many times over",
        mend="import what is heavy inside the function that needs it; open resources in `lifespan`",
        run=imported,
        loads=False,
    ),
)
