"""The page for users of NeMo Gym: the rows of its table, and which tests cover them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "coming-from-nemo-gym.md"
ROW = re.compile(r"^\| (\d+) \| (.*?) \| (.*?) \| ?(.*?) ?\|$", re.MULTILINE)
FILE = re.compile(r'^```\w+ title="?([^\s"]+)"?\n(.*?)^```$', re.MULTILINE | re.DOTALL)

T = TypeVar("T", bound=Callable[..., object])


@dataclass(frozen=True)
class Row:
    """One row of the table: the code in NeMo Gym's cell and in gymsdk's, and the text about differences."""

    nemo_gym: tuple[str, ...]
    gymsdk: tuple[str, ...]
    differs: str


def find_code(cell: str) -> tuple[str, ...]:
    return tuple(re.findall(r"`([^`]+)`", cell))


TABLE = {
    int(found[1]): Row(find_code(found[2]), find_code(found[3]), found[4]) for found in ROW.finditer(PAGE.read_text())
}


def nemo_gym_command(number: int, index: int = 0) -> str:
    """Return a command of NeMo Gym from the table."""
    return TABLE[number].nemo_gym[index]


def gymsdk_command(number: int, index: int = 0) -> str:
    """Return the command of gymsdk from the table."""
    return TABLE[number].gymsdk[index]


def page_file(name: str) -> str:
    """Return the file called *name* that the page shows."""
    return dict(FILE.findall(PAGE.read_text()))[name]


def covers(*numbers: int) -> Callable[[T], T]:
    """Mark which rows of the table a test covers; `list_covered` reads the numbers from the source."""
    assert set(numbers) <= set(TABLE), "the table has no such row"
    return lambda test: test


def list_covered() -> Iterator[int]:
    """Yield the rows that the tests cover."""
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for call in node.decorator_list:
                    if isinstance(call, ast.Call) and ast.unparse(call.func) == "covers":
                        yield from (ast.literal_eval(argument) for argument in call.args)
