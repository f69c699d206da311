"""The table of CONTRIBUTING.md names the files for frequent changes; they and the names in them exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECTION = (ROOT / "CONTRIBUTING.md").read_text().split("## Where to change something")[1].split("\n## ")[0]
ROWS = {row[0]: row[1:] for row in re.findall(r"^\| (.+?) \| (.+?) \|(.*?) ?\|$", SECTION, re.MULTILINE)}
FILE = re.compile(r"`((?:[\w.-]+/)+[\w.-]*)`(?: \(((?:`[\w.]+`(?:, )?)+)\))?")
QUESTIONS = (
    "add a model provider",
    "change how a failed model call is retried",
    "add a column to the table of `gymsdk rollout`",
    "add a field to `/verify`'s response",
    "change when a session expires",
    "add a check",
    "change pass@k",
    "add an authentication scheme",
    "change how tool arguments are validated",
    "add a page to the viewer",
)


def list_files(cell: str) -> list[tuple[str, list[str]]]:
    """Return the files that *cell* names, and the names in parentheses behind each."""
    return [(path, re.findall(r"[\w.]+", names)) for path, names in FILE.findall(cell)]


def list_names(path: Path) -> Iterator[str]:
    """Yield the functions, classes, methods and constants of a module or script, methods as `Class.method`."""
    if path.suffix == ".js":
        yield from re.findall(r"^(?:export )?(?:async )?(?:function|const|class) (\w+)", path.read_text(), re.MULTILINE)
        return
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
        for target in getattr(statement, "targets", None) or [getattr(statement, "target", None)]:
            if isinstance(target, ast.Name):
                yield target.id
        if isinstance(statement, ast.ClassDef):
            members = (node for node in statement.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (f"{statement.name}.{member.name}" for member in members)


@pytest.mark.parametrize("question", list(ROWS)[1:])
def test_the_files_and_names_of_a_row_exist_and_the_answer_is_at_most_two_files_away(question: str) -> None:
    answer = list_files(ROWS[question][0])
    assert question not in QUESTIONS or (1 <= len(answer) <= 2 and all(names for _, names in answer))
    files = [file for cell in ROWS[question] for file in list_files(cell)]
    assert files
    assert [path for path, _ in files if not (ROOT / path).exists()] == []
    missing = {path: set(names) - set(list_names(ROOT / path)) for path, names in files if names}
    assert {path: names for path, names in missing.items() if names} == {}


def test_the_frequent_questions_have_a_row() -> None:
    assert set(QUESTIONS) <= set(ROWS)
