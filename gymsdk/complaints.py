"""What went wrong, as one sentence: pydantic's complaints, and errors raised by an author's code."""

from __future__ import annotations

import asyncio
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

INTERRUPTS = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""What ends the code that is running from outside.

Everything else that an author's code raises is an error of that code, also what is no `Exception`: `SystemExit`, or the
panic of a Rust extension.
"""

CALLERS = ("pydantic", "pluggy")
"""Libraries by which gymsdk calls an author's code."""

MOST = 8
"""How many complaints a sentence names."""

LONGEST = 300
"""How many characters one complaint may take: it may quote what a policy wrote."""

WORDS = {
    "path_type": "Input should be a path",
    "tuple_type": "Input should be a list",
}
"""Complaints in the words of JSON and YAML, where pydantic has Python's."""


def sentence(error: ValidationError) -> str:
    """Give the complaints of *error*, each behind the place it is about; the first of many."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    named = [_short(f"{where}: {said(each)}" if (where := place(each)) else said(each)) for each in found[:MOST]]
    more = [f"and {len(found) - MOST} more"] if len(found) > MOST else []
    return "; ".join(named + more)


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def place(complaint: Mapping[str, Any]) -> str:
    """Give the place one complaint is about, as in `world.contacts.0.name`; nothing where it is about the whole."""
    return ".".join(map(str, complaint["loc"]))


def said(complaint: Mapping[str, Any]) -> str:
    """Give one complaint's own words."""
    if complaint["type"] in WORDS:
        return WORDS[complaint["type"]]
    message: str = complaint["msg"]
    return message.removeprefix("Value error, ")


def raised(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Give an error's type and message, and the line of the author's code that it comes from.

    Args:
        error: What the author's code raised.
        function: The author's function that was called, where it is known. Its package tells the author's lines from
            those of libraries. Without it, the package of the outermost line does, apart from gymsdk and `CALLERS`.
    """
    message = sentence(error) if isinstance(error, ValidationError) else str(error)
    where = author_line(traceback.extract_tb(error.__traceback__), function)
    return f"{type(error).__name__}: {message}" + (f" ({where})" if where else "")


def author_line(frames: Sequence[traceback.FrameSummary], function: Callable[..., Any] | None = None) -> str:
    """Give the innermost line of the author's own code among *frames*, and the library's line where it ended."""
    foreign = [each for each in frames if not (_is_ours(Path(each.filename)) or each.filename.startswith("<frozen"))]
    if not foreign:
        return ""
    first = next((each for each in foreign if _package(Path(each.filename)).name not in CALLERS), foreign[0])
    home = _package(Path(_file_of(function) or first.filename))
    own = [frame for frame in foreign if _package(Path(frame.filename)) == home]
    if not own or own[-1] is foreign[-1]:
        return _position(foreign[-1])
    return f"{_position(own[-1])}, in a call that ended at {_in_library(foreign[-1])}"


def _file_of(function: Callable[..., Any] | None) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    return code.co_filename if code else None


def _package(file: Path) -> Path:
    """Give the outermost package that *file* is in, or the file itself where it is a module of its own."""
    if not file.is_absolute():
        # Code made at run time is in no file: its frames are called `<string>` and the like.
        return file
    package = file
    while package.parent != package and (package.parent / "__init__.py").exists():
        package = package.parent
    return package


def _position(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _in_library(frame: traceback.FrameSummary) -> str:
    file = Path(frame.filename)
    return f"{file.relative_to(_package(file).parent)}:{frame.lineno}"


def _is_ours(file: Path) -> bool:
    """Whether *file* is the host's or Python's own, and no author's."""
    homes = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
    return "site-packages" not in file.parts[len(homes[1].parts) :] and any(home in file.parents for home in homes)
