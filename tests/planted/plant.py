"""Plant faults in a copy of the package, and check that the tests catch each of them.

    python tests/planted/plant.py                           # all faults
    python tests/planted/plant.py --random 2 [--seed S]     # two faults at random; the seed is printed
    python tests/planted/plant.py masked-line-counted       # by name

Each file `NAME.fault` holds one fault: what breaks, the tests that must fail, and the lines to change.

    breaks: The reward of an episode leaves out the rewards of its steps.
    tests: tests/episodes/test_episode.py::test_step_rewards_are_a_component_of_the_reward
    file: gymsdk/episode.py
    -        reward = verdict.reward + paid
    +        reward = verdict.reward

Lines with `-` are replaced by those with `+`; lines with a space before them stay, and only say where. The lines are
looked for in the file that is named, then in the whole package, at any indentation: code that moves unchanged does not
need a new fault. The script needs the Python environment of the tests, and changes nothing in the working tree.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent

COPIED = ("gymsdk", "tests", "pyproject.toml")
"""The folders and files that the tests of the faults read."""

RUN_SECONDS = 600
"""How long all tests of the chosen faults may take."""

TEST_SECONDS = 20
"""How long one test may take if a fault is planted: with a fault, a test may wait forever."""


class FaultError(Exception):
    """A fault that cannot be planted, or that the tests do not catch; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Change:
    """Lines to replace in one file of the package.

    Attributes:
        file: The file, relative to the root of the tree.
        old: The lines to find.
        new: The lines in their place.
    """

    file: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        name: The name of its file.
        breaks: What no longer works with the fault.
        tests: The tests that must fail.
        changes: The changes to the code.
    """

    name: str
    breaks: str
    tests: tuple[str, ...]
    changes: tuple[Change, ...]


def read_fault(path: Path) -> Fault:
    """Return the fault in a file."""
    headers: dict[str, str] = {}
    changes: list[Change] = []
    for line in path.read_text().splitlines():
        if key := re.match(r"(breaks|tests|file): +(.+)", line):
            headers[key[1]] = key[2]
            changes += [Change(key[2])] if key[1] == "file" else []
        elif changes and line[:1] in {"-", "+", " "}:
            changes[-1].old.extend([line[1:]] if line[0] != "+" else [])
            changes[-1].new.extend([line[1:]] if line[0] != "-" else [])
        elif line:
            raise FaultError(f"{path.name}: the line {line!r} is neither a header nor begins with '-', '+' or a space")
    if not (headers.get("breaks") and headers.get("tests") and changes):
        raise FaultError(f"{path.name}: it needs the headers 'breaks', 'tests' and 'file', and the lines to change")
    return Fault(path.stem, headers["breaks"], tuple(headers["tests"].split()), tuple(changes))


def read_faults(folder: Path = FOLDER) -> dict[str, Fault]:
    """Return all faults by name."""
    return {path.stem: read_fault(path) for path in sorted(folder.glob("*.fault"))}


def check_fault(fault: Fault, root: Path) -> None:
    """Check that a fault can be planted and that its tests exist; raises `FaultError`."""
    for test in fault.tests:
        file, _, name = test.partition("::")
        if not (root / file).is_file() or f"def {name}(" not in (root / file).read_text():
            raise FaultError(f"{fault.name}: there is no test {test}; name the test that now catches the fault")
    for change in fault.changes:
        find_place(fault, change, root)


def plant(fault: Fault, root: Path) -> None:
    """Make the changes of a fault in the tree at *root*; raises `FaultError`."""
    for change in fault.changes:
        path, start = find_place(fault, change, root)
        lines = path.read_text().splitlines()
        found = lines[start : start + len(change.old)]
        indent = found[0][: len(found[0]) - len(found[0].lstrip())]
        lines[start : start + len(change.old)] = textwrap.indent(_dedent(change.new), indent).splitlines()
        path.write_text("\n".join(lines) + "\n")


def find_place(fault: Fault, change: Change, root: Path) -> tuple[Path, int]:
    """Return the only place of the lines that a change replaces: the file, and the index of the first line."""
    named = root / change.file
    places = _find_in(change.old, [named] if named.is_file() else [])
    places = places or _find_in(change.old, sorted((root / "gymsdk").rglob("*.py")))
    if len(places) == 1:
        return places[0]
    if places:
        where = ", ".join(f"{path.relative_to(root)}:{start + 1}" for path, start in places)
        raise FaultError(f"{fault.name}: its lines are in several places ({where}); add a line before or after them")
    raise FaultError(
        f"{fault.name}: its lines are no longer in the package, because the code has changed:\n"
        + textwrap.indent("\n".join(change.old), "    ")
        + f"\n  Change {fault.name}.fault so that today's code breaks in the same way ({fault.breaks})"
    )


def _find_in(old: Sequence[str], files: Iterable[Path]) -> list[tuple[Path, int]]:
    wanted = _dedent(old)
    places = []
    for path in files:
        lines = path.read_text().splitlines()
        places += [
            (path, start)
            for start, line in enumerate(lines)
            if line.strip() == old[0].strip() and _dedent(lines[start : start + len(old)]) == wanted
        ]
    return places


def _dedent(lines: Sequence[str]) -> str:
    return textwrap.dedent("\n".join(lines))


def copy_tree(root: Path, target: Path) -> None:
    """Copy `COPIED` of the tree at *root* to the folder *target*."""
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist")
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, target / name, ignore=ignored, symlinks=True)
        else:
            shutil.copy2(root / name, target / name)


def run_tests(tests: Iterable[str], tree: Path, *options: str) -> tuple[int, str]:
    """Run *tests* against the package in the folder *tree*; return the exit code of pytest and its output."""
    fixed = ["-n", "0", "-m", "", "-q", "-rfs", "--tb=line", "-p", "no:cacheprovider"]
    paths = [str(tree), os.environ.get("PYTHONPATH", "")]
    process = subprocess.run(
        [sys.executable, "-m", "pytest", *fixed, *options, *dict.fromkeys(tests)],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    return process.returncode, process.stdout + process.stderr


def check_caught(fault: Fault, status: int, output: str) -> None:
    """Check that each test of a planted fault failed; raises `FaultError`."""
    failed = re.findall(r"^FAILED (\S+)", output, re.MULTILINE)
    missed = [test for test in fault.tests if not any(name.split("[")[0] == test for name in failed)]
    if status not in {0, 1}:
        raise FaultError(f"{fault.name}: the tests did not run with the fault:\n{_indent_tail(output)}")
    if missed:
        raise FaultError(
            f"{fault.name}: not caught by {', '.join(missed)}; nothing notices that this breaks: {fault.breaks}"
            f" Write a test that fails with the fault, or name one.\n{_indent_tail(output)}"
        )


def check_planted(faults: Sequence[Fault], root: Path = ROOT) -> int:
    """Plant *faults* one by one in copies of the tree at *root*, print the results, and return how many went wrong."""
    wrong = 0
    for fault in faults:
        try:
            check_fault(fault, root)
        except FaultError as error:
            wrong += 1
            print(f"WRONG   {error}", flush=True)
    if wrong:
        return wrong
    with tempfile.TemporaryDirectory(prefix="planted-") as scratch:
        sound = Path(scratch, "sound")
        copy_tree(root, sound)
        status, output = run_tests((test for fault in faults for test in fault.tests), sound)
        if status or "skipped" in output:
            print(f"the tests must run and pass without a fault:\n{_indent_tail(output)}")
            return len(faults)
        for number, fault in enumerate(faults):
            started, tree = time.perf_counter(), Path(scratch, f"planted{number}")
            try:
                copy_tree(root, tree)
                plant(fault, tree)
                check_caught(fault, *run_tests(fault.tests, tree, f"--timeout={TEST_SECONDS}"))
                print(f"caught  {time.perf_counter() - started:5.1f} s  {fault.name}: {fault.breaks}", flush=True)
            except FaultError as error:
                wrong += 1
                print(f"WRONG   {time.perf_counter() - started:5.1f} s  {error}", flush=True)
            shutil.rmtree(tree, ignore_errors=True)
    return wrong


def _indent_tail(output: str, count: int = 15) -> str:
    return textwrap.indent("\n".join(output.splitlines()[-count:]), "    ")


def main() -> int:
    """Check the faults that the command line names; exit with 1 if one is not caught."""
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the package; the tests must catch them.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to plant (default: all)")
    parser.add_argument("--random", type=int, metavar="N", help="plant N faults chosen at random")
    parser.add_argument("--seed", type=int, help="the seed of the choice (default: random)")
    given = parser.parse_args()
    faults = read_faults()
    if unknown := [name for name in given.names if name not in faults]:
        parser.error(f"no fault {', '.join(unknown)}; the faults are {', '.join(faults)}")
    chosen = given.names or list(faults)
    if given.random is not None:
        seed = random.randrange(1_000_000) if given.seed is None else given.seed
        chosen = random.Random(seed).sample(chosen, min(given.random, len(chosen)))
        print(f"seed {seed}: {', '.join(chosen)}", flush=True)
    wrong = check_planted([faults[name] for name in chosen])
    print(f"{len(chosen) - wrong} of {len(chosen)} faults are caught")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
