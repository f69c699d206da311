"""Only `gymsdk.interpreter` builds commands that run Python, so that no child imports from the working folder."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gymsdk.interpreter import (
    build_code_command,
    build_isolated_command,
    build_module_command,
    build_program_command,
    get_search_path,
)

ROOT = Path(__file__).resolve().parent.parent
BUILDER = ROOT / "gymsdk" / "interpreter.py"

PYTHON = re.compile(r"(.*/)?(python|pypy)[\d.]*( .*)?", re.DOTALL)
FLAGS = {"-m", "-c", "-I", "-P"}
STARTERS = re.compile(
    r"Popen|run|call|check_call|check_output|create_subprocess_\w+|exec[lv]p?e?|spawn\w+|system|popen"
)
SPAWNING = {"multiprocessing", "concurrent.futures.process", "runpy"}
"""Modules with children that import from the working folder, unless this process was started with `-P`."""

SHOWN = {"gymsdk/rollouts/plan.py": "describe_program"}
"""Functions that show a command and do not run it."""


def find_commands(tree: ast.Module) -> Iterator[str]:
    """Yield each place in *tree* that runs Python by itself."""
    for node in ast.walk(tree):
        if any(describe_offence(node)):
            yield f"line {node.lineno}: {ast.unparse(node)}"  # type: ignore[attr-defined]  # all of them have a line


def describe_offence(node: ast.AST) -> Iterator[bool]:
    """Yield true if *node* names the interpreter, holds a command that runs it, or imports what starts it."""
    match node:
        case ast.Attribute(value=ast.Name("sys"), attr="executable" | "_base_executable"):
            yield True
        case ast.ImportFrom(module="sys", names=names):
            yield any("executable" in name.name for name in names)
        case ast.ImportFrom(module="concurrent.futures", names=names):
            yield any(name.name == "ProcessPoolExecutor" for name in names)
        case ast.ImportFrom(module=str(module)):
            yield is_spawning(module)
        case ast.Import(names=names):
            yield any(is_spawning(name.name) for name in names)
        case ast.List(elts=[first, *rest]) | ast.Tuple(elts=[first, *rest]):
            yield bool(rest) and is_python(first)
            yield any(isinstance(element, ast.Constant) and element.value in FLAGS for element in [first, *rest])
        case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name), args=[first, *_]) if STARTERS.fullmatch(name):
            yield is_python(first)


def is_spawning(module: str) -> bool:
    return module in SPAWNING or module.partition(".")[0] in SPAWNING


def is_python(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(PYTHON.fullmatch(node.value))


def list_sources() -> list[Path]:
    folders = ("gymsdk", "compat/gymsdk_nemo_compat", "compat/nemo_gym", "startup")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != BUILDER)


def parse(path: Path) -> ast.Module:
    """Parse the module at *path*, without the function that only shows a command."""
    tree = ast.parse(path.read_text())
    shown = SHOWN.get(path.relative_to(ROOT).as_posix())
    tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name == shown)]
    return tree


def test_only_one_module_builds_commands_that_run_python() -> None:
    sources = list_sources()
    assert len(sources) > 250
    found = {str(path.relative_to(ROOT)): places for path in sources if (places := list(find_commands(parse(path))))}
    assert not found, f"use gymsdk.interpreter instead: {json.dumps(found, indent=2)}"


@pytest.mark.parametrize(
    "source",
    [
        "Popen([sys.executable, 'x.py'])",
        "from sys import executable",
        "run(['python', '-m', 'gymsdk'])",
        "run([python, *('-c', code)])",
        "create_subprocess_shell('python3 x.py')",
        "import multiprocessing",
        "from concurrent.futures import ProcessPoolExecutor",
        "import runpy",
    ],
)
def test_the_test_finds_such_a_command(source: str) -> None:
    assert list(find_commands(ast.parse(source)))


def run(command: list[str], folder: Path) -> list[str]:
    """Run *command* in *folder*, and return the search path that it prints as JSON."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    path: list[str] = json.loads(done.stdout)
    return path


def test_a_module_does_not_search_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "this.py").write_text("raise SystemExit('from the working folder')")
    done = subprocess.run(build_module_command("this"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "The Zen of Python" in done.stdout, done.stderr


PRINT_PATH = "import json, sys; print(json.dumps(sys.path))"


def test_code_searches_the_path_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "there" / "json.py").write_text("raise SystemExit('from the folder of the child')")
    hook = "__editable__.example-1.0.finder.__path_hook__"
    monkeypatch.setattr(sys, "path", [*sys.path, "", "../here", hook])
    path = run(build_code_command(PRINT_PATH), tmp_path / "there")
    here = str(tmp_path / "here")
    assert path == get_search_path() == [*sys.path[:-3], here, here, hook]


def test_code_receives_its_arguments(tmp_path: Path) -> None:
    code = "import json, sys\nprint(json.dumps(sys.argv[1:]))"
    assert run(build_code_command(code, "a b", "-c"), tmp_path) == ["a b", "-c"]


def test_an_isolated_file_searches_the_standard_library_only(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text(PRINT_PATH)
    path = run(build_isolated_command(str(file)), tmp_path)
    assert str(tmp_path) not in path
    assert not [entry for entry in path if "site-packages" in entry]


def test_a_program_searches_its_own_folder_first(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    file = tmp_path / "app" / "app.py"
    file.write_text(PRINT_PATH)
    path = run(build_program_command(sys.executable, str(file)), tmp_path)
    assert path[0] == str(tmp_path / "app")
    assert str(tmp_path) not in path
