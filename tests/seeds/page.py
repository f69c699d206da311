"""The page for people from NeMo Gym: the rows of its table, and which tests try them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coming-from-nemo-gym.md"
LINE = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \| ?(.*?) ?\|$", re.MULTILINE)
FILE = re.compile(r'^```\w+ title="?([^\s"]+)"?\n(.*?)^```$', re.MULTILINE | re.DOTALL)

T = TypeVar("T", bound=Callable[..., object])


@dataclass(frozen=True)
class Line:
    """One row of the table: what is code in NeMo Gym's cell and in ours, and what differs."""

    theirs: tuple[str, ...]
    ours: tuple[str, ...]
    differs: str


def code(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


TABLE = {int(found[1]): Line(code(found[2]), code(found[3]), found[4]) for found in LINE.finditer(PAGE.read_text())}


def theirs(number: int, which: int = 0) -> str:
    """Give a command of NeMo Gym's as the table has it."""
    return TABLE[number].theirs[which]


def ours(number: int, which: int = 0) -> str:
    """Give the command that is gymsdk's, as the table has it."""
    return TABLE[number].ours[which]


def file(name: str) -> str:
    """Give the file called *name* that the page shows."""
    return dict(FILE.findall(PAGE.read_text()))[name]


def tries(*numbers: int) -> Callable[[T], T]:
    """Say which rows of the table a test tries; `tried` reads it out of the source."""
    assert set(numbers) <= set(TABLE), "there is no such row"
    return lambda test: test


def tried() -> Iterator[int]:
    """Yield the rows that a test tries."""
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "tries":
                        yield from (ast.literal_eval(each) for each in call.args)
