"""Places: where a setting was written, and what is wrong, each told with its place."""

from __future__ import annotations

from typing import TypeAlias

from pydantic import BaseModel, ConfigDict

from gymsdk.errors import BadConfig

Trail: TypeAlias = tuple[str, ...]
"""The keys that lead to a setting, from the top."""

SHORTEST = 6
"""Characters below which a secret is not looked for in messages: words like `none` stand in others."""


class Place(BaseModel):
    """Where a setting comes from: a file and a line of it, or a source without lines.

    *found* says that nobody named the file: it was read because it lies in the working folder, or because such a
    file includes it. `untrusted` lists what it may not set. *origin* is set on a resolved value whose text stands in
    another source and refers to a value of such a file: it is the place of that value.
    """

    model_config = ConfigDict(frozen=True)

    source: str
    line: int | None = None
    found: bool = False
    origin: Place | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


DEFAULT = Place(source="default")
COMMAND = Place(source="command line")
HANDED = Place(source="handed over")


class Problems:
    """What is wrong with a configuration, gathered so that all of it is told together; no *secrets* are told."""

    def __init__(self) -> None:
        self.secrets: set[str] = set()
        self._warnings: dict[str, None] = {}
        self._lines: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, place: Place, sentence: str) -> None:
        """Keep one *sentence* about what stands at *place*."""
        self._lines[f"{place}: {sentence}"] = None

    def warn(self, place: Place, sentence: str) -> None:
        """Keep one *sentence* about what stands at *place* and is ignored: it stops nobody."""
        self._warnings[f"{place}: {sentence}"] = None

    @property
    def warnings(self) -> tuple[str, ...]:
        """The sentences about what is ignored."""
        return tuple(hidden(line, self.secrets) for line in self._warnings)

    def add_error(self, error: BadConfig) -> None:
        """Keep what *error* says, which names its place already."""
        self._lines.update(dict.fromkeys(str(error).splitlines()))

    def merge(self, others: Problems) -> None:
        """Keep what *others* tell."""
        self._lines |= others._lines

    def raise_if_any(self) -> None:
        """Raise `BadConfig` with a line for each, if there are any."""
        if self._lines:
            raise BadConfig("\n".join(hidden(line, self.secrets) for line in self._lines))


def hidden(text: str, secrets: set[str]) -> str:
    """Give *text* with `***` for every secret in it."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, "***")
    return text


def dotted(trail: Trail) -> str:
    """Give *trail* as it is written on the command line."""
    return ".".join(trail)
