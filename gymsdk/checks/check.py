"""A check: one thing an environment may be held to, what it found, and what follows from that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

from gymsdk.checks.subject import Subject

Status: TypeAlias = Literal["passed", "failed", "skipped"]
"""How a check ended; a skipped one says what it would have needed."""


class NotApplicable(Exception):
    """The environment has nothing this check could look at; the message says what is missing."""


def _writable(text: str) -> str:
    """Give *text* with what no file can hold escaped: half a surrogate pair, which a policy may have written."""
    return text.encode("utf-8", "backslashreplace").decode()


Words: TypeAlias = Annotated[str, BeforeValidator(_writable)]


class Finding(BaseModel):
    """One thing that is wrong: what was *seen*, in which *task*, how to *mend* it where the check is too wide."""

    model_config = ConfigDict(frozen=True)

    seen: Words
    task: Words = ""
    mend: Words = ""


Look: TypeAlias = Callable[[Subject], Awaitable[list[Finding]]]
"""Looks at a subject and gives what is wrong, nothing where all is well; raises `NotApplicable`."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its *id*, what it asks for as a sentence, *why* that matters, how to *mend* what it finds.

    Ids are `packaging.*`, `runtime.*` and `semantic.*`; where OpenEnv's RFC 008 has one for the same thing it is that.
    *needs* are the packages of the extra `author` it imports, *seconds* what it may take; *loads* says that it looks
    at the loaded environment, and so cannot be asked where that does not load.
    """

    id: str
    asks: str
    why: str
    mend: str
    run: Look
    needs: tuple[str, ...] = ()
    seconds: float = 120.0
    loads: bool = True


class Result(BaseModel):
    """What came of one check; *reason* says why it was skipped, *seconds* how long it took.

    *warnings* are what gymsdk warned of meanwhile.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    asks: str
    status: Status
    why: str = ""
    mend: str = ""
    findings: list[Finding] = []
    reason: Words = ""
    warnings: list[Words] = []
    seconds: float = 0.0


class Report(BaseModel):
    """What came of all checks of one environment."""

    model_config = ConfigDict(frozen=True)

    environment: str
    version: str
    seed: int
    results: list[Result]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(result.status != "failed" for result in self.results)
