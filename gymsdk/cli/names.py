"""The name of a new environment: what it may be, and what is named after it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gymsdk.errors import UsageError

PREFIX = "gym-env-"
"""What the distribution's name has before the environment's."""

PATTERN = r"(?!(?i:gym-env-))(?!.*-v[0-9]+\Z)[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9])?"
"""The names that are right; the template's own check has the same pattern."""


@dataclass(frozen=True, slots=True)
class Name:
    """An environment's name, and those of its distribution, which is its folder too, and its module."""

    name: str

    @property
    def distribution(self) -> str:
        """What pip calls it."""
        return f"{PREFIX}{self.name}"

    @property
    def module(self) -> str:
        """What Python calls it: importable whatever the name is, for the prefix is no reserved word's."""
        return re.sub(r"[-.]", "_", self.distribution).lower()


def canonical(name: str) -> str:
    """Give *name* as indexes compare it: two distributions of one canonical name are one."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(name: str) -> Name:
    """Give *name* where it can be an environment's; raises `UsageError`."""
    if re.fullmatch(PATTERN, name):
        return Name(name)
    raise UsageError(_complaint(name))


def _complaint(name: str) -> str:
    shown = ascii(name if len(name) <= 80 else f"{name[:80]}…")  # noqa: PLR2004  # what fits a line
    if name.lower().startswith(PREFIX):
        rest = name[len(PREFIX) :] or "NAME"
        return f"the name {shown} is the distribution's; leave out the `{PREFIX}`: `gymsdk new {rest}`"
    if re.fullmatch(r".*-v[0-9]+", name):
        return f"the name {shown} ends like a Gymnasium version; leave out the `-v<digits>`, or write `_v<digits>`"
    return (
        f"{shown} is no name for an environment; choose 1 to 64 letters, digits, `-`, `_` and `.`,"
        " a letter or digit at both ends, as in `gymsdk new my-env`"
    )
