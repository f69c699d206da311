"""What went wrong, as one sentence: pydantic's complaints, and errors raised by an author's code."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

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


def raised(error: BaseException) -> str:
    """Give an error's type and words, and the line of the author's code it was raised at."""
    words = sentence(error) if isinstance(error, ValidationError) else str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _ours(Path(frame.filename))]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {words}{where}"


def _ours(file: Path) -> bool:
    """Whether *file* is the host's or Python's own, and no author's."""
    homes = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
    return "site-packages" not in file.parts[len(homes[1].parts) :] and any(home in file.parents for home in homes)
