"""Imports flow one way: as the table in `docs/architecture.md` says."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WORD = re.compile(r"`([\w.*]+)`")
ROW = re.compile(r"^\| (\d) [^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|$", re.MULTILINE)


@dataclass(frozen=True)
class Layer:
    """One row of the table."""

    number: int
    modules: tuple[str, ...]
    beneath: frozenset[int]
    each_other: bool
    third_parties: tuple[tuple[str, tuple[str, ...]], ...]

    def holds(self, module: str) -> bool:
        return any(fnmatchcase(module, pattern) for pattern in self.modules)


def layer(row: re.Match[str]) -> Layer:
    number = int(row[1])
    span = re.search(r"(\d)(?:\N{EN DASH}(\d))?", row[3])
    beneath = range(number) if "everything" in row[3] else range(int(span[2] or span[1]) + 1) if span else range(0)
    return Layer(
        number=number,
        modules=tuple(WORD.findall(row[2])),
        beneath=frozenset(beneath),
        each_other="never each other" not in row[3],
        third_parties=tuple(third_party for phrase in row[4].split(";") for third_party in allowed(phrase)),
    )


def allowed(phrase: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Which packages a phrase of the table allows, and in which modules, in any above where it does not say."""
    packages, _, where = phrase.partition(" in ")
    return ((package, tuple(WORD.findall(where))) for package in WORD.findall(packages))


LAYERS = [layer(row) for row in ROW.finditer((ROOT / "docs" / "architecture.md").read_text())]


@dataclass(frozen=True)
class Module:
    """One file, its name without the package, and what it imports."""

    name: str
    path: Path
    package: str

    def imported(self, node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        """The dotted names one statement imports, relative ones made absolute."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
            return
        home = [self.package, *self.name.split(".")] if self.name else [self.package]
        home = home if self.path.name == "__init__.py" else home[:-1]
        base = (
            ".".join([*home[: len(home) - node.level + 1], *filter(None, [node.module])]) if node.level else node.module
        )
        yield from (f"{base}.{alias.name}" for alias in node.names)

    def imports(self, *, at_the_top: bool = False) -> set[str]:
        tree = ast.parse(self.path.read_text())
        nodes = top(tree) if at_the_top else ast.walk(tree)
        return {name for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for name in self.imported(node)}


def top(tree: ast.Module) -> Iterator[ast.stmt]:
    """What runs when the module is imported: not functions, not what only a type checker reads."""
    for node in tree.body:
        if isinstance(node, ast.Try):
            yield from node.body
        yield node


def modules(folder: Path) -> list[Module]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(Module(name, path, folder.name))
    return found


OURS = {module.name or "gymsdk": module for module in modules(ROOT / "gymsdk")}


def ours(name: str) -> str | None:
    """The module of ours that an imported name is, or is in; `None` where it is another's."""
    first, *rest = name.split(".")
    if first != "gymsdk":
        return None
    while rest and ".".join(rest) not in OURS:
        rest.pop()
    return ".".join(rest) or "gymsdk"


def third_parties(module: Module) -> set[str]:
    tops = {name.split(".")[0] for name in module.imports()}
    return tops - sys.stdlib_module_names - {module.package, "gymsdk"}


def homes(name: str) -> list[Layer]:
    """The layers whose rows name the module: by its own name, or else by a pattern."""
    exact = [each for each in LAYERS if name in each.modules]
    return exact or [each for each in LAYERS if each.holds(name)]


def is_bare(module: Module) -> bool:
    """Whether it only makes a folder a package."""
    return module.path.name == "__init__.py" and not module.imports()


PLACED = sorted(name for name, module in OURS.items() if not is_bare(module))


def test_the_table_is_read():
    assert [each.number for each in LAYERS] == list(range(len(LAYERS)))
    assert len(LAYERS) > 5


@pytest.mark.parametrize("name", PLACED)
def test_a_module_stands_in_one_layer(name):
    assert len(homes(name)) == 1, f"put `{name}` into one row of the table in docs/architecture.md"


def test_the_table_names_no_module_that_is_gone():
    named = [pattern for each in LAYERS for pattern in each.modules]
    assert [pattern for pattern in named if not any(fnmatchcase(name, pattern) for name in OURS)] == []


@pytest.mark.parametrize("name", PLACED)
def test_a_module_imports_what_its_layer_may(name):
    [home] = homes(name)
    others = {found for each in OURS[name].imports() if (found := ours(each)) and found != name}
    wrong = [
        other
        for other in sorted(others)
        for its in homes(other)
        if not (its.number in home.beneath or (its.number == home.number and home.each_other))
    ]
    assert wrong == [], f"{name} is in layer {home.number}"


@pytest.mark.parametrize("name", PLACED)
def test_a_module_uses_the_third_parties_of_its_layer(name):
    [home] = homes(name)
    open_to_it = {
        package
        for each in LAYERS[: home.number + 1]
        for package, where in each.third_parties
        if not where or any(fnmatchcase(name, pattern) for pattern in where)
    }
    assert third_parties(OURS[name]) <= open_to_it


def test_imports_at_the_top_form_no_circle():
    graph = {
        name: {found for each in module.imports(at_the_top=True) if (found := ours(each)) and found != name}
        for name, module in OURS.items()
    }
    assert set(TopologicalSorter(graph).static_order()) == set(OURS)


ENVIRONMENTS = sorted(ROOT.glob("environments/*/gym_env_*"))


@pytest.mark.parametrize("folder", ENVIRONMENTS, ids=lambda folder: folder.name)
def test_an_environment_imports_gymsdk_itself_and_nothing_beneath_it(folder):
    beneath = {
        f"{module.name}: {name}"
        for module in modules(folder)
        for name in module.imports()
        if name.split(".")[0] == "gymsdk" and ours(name) != "gymsdk"
    }
    assert beneath == set()


@pytest.mark.parametrize("folder", ENVIRONMENTS, ids=lambda folder: folder.name)
def test_an_environment_uses_the_third_parties_it_requires(folder):
    required = tomllib.loads((folder.parent / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = {re.match(r"[\w.-]+", each)[0].replace("-", "_") for each in required} | {"pydantic"}
    used = {name for module in modules(folder) for name in third_parties(module)}
    assert used <= packages


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import gymsdk.http", "http"),
        ("from gymsdk import http", "http"),
        ("from gymsdk.http import post", "http"),
        ("from . import http", "http"),
        ("from .models import registry", "models.registry"),
        ("def f():\n    from gymsdk.http import post", "http"),
        ("if True:\n    import gymsdk.http", "http"),
        ("from gymsdk import Task", "gymsdk"),
        ("import json", None),
    ],
)
def test_an_import_is_found_however_it_is_written(tmp_path, source, name):
    path = tmp_path / "made.py"
    path.write_text(source)
    assert {ours(each) for each in Module("made", path, "gymsdk").imports()} == {name}
