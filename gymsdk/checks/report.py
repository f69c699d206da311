"""A report as people read it: a line for each check, beneath it what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from textwrap import fill
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

from gymsdk.checks.subject import Subject

Status: TypeAlias = Literal["passed", "failed", "skipped"]
"""How a check ended; a skipped one says what it would have needed."""


class NotApplicable(Exception):
    """The environment has nothing this check could look at; the message says what is missing."""


def _escape_surrogates(text: str) -> str:
    """Give *text* with what no file can hold escaped: half a surrogate pair, which a policy may have written."""
    return text.encode("utf-8", "backslashreplace").decode()


EscapedText: TypeAlias = Annotated[str, BeforeValidator(_escape_surrogates)]


class Finding(BaseModel):
    """One thing that is wrong: what was *seen*, in which *task*, how to *mend* it where the check is too wide."""

    model_config = ConfigDict(frozen=True)

    seen: EscapedText
    task: EscapedText = ""
    mend: EscapedText = ""


CheckFunction: TypeAlias = Callable[[Subject], Awaitable[list[Finding]]]
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
    run: CheckFunction
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
    reason: EscapedText = ""
    warnings: list[EscapedText] = []
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


STATUS_MARKS = {"passed": "ok", "failed": "FAIL", "skipped": "skip"}

MAX_FINDINGS = 5
"""Findings of one check that are shown."""

LINE_WIDTH = 110


def format_summary(result: Result) -> str:
    """Give the line of one check."""
    told = result.reason if result.status == "skipped" else result.asks
    return f"{STATUS_MARKS[result.status]:<4}  {result.id:<32}  {told}"


def format_details(result: Result) -> Iterator[str]:
    """Yield what stands beneath that line: what was seen, why it matters, how to mend it, what was warned of."""
    for finding in result.findings[:MAX_FINDINGS]:
        where = f"  [{finding.task}]" if finding.task else ""
        yield _wrap_line("seen", f"{finding.seen}{where}")
    if len(result.findings) > MAX_FINDINGS:
        yield _wrap_line("", f"and {len(result.findings) - MAX_FINDINGS} more")
    if result.findings:
        yield _wrap_line("why", result.why)
        mends = dict.fromkeys(finding.mend for finding in result.findings if finding.mend)
        yield from (_wrap_line("mend", mend) for mend in mends or [result.mend])
    yield from (_wrap_line("warn", warning) for warning in result.warnings)


def _wrap_line(word: str, text: str) -> str:
    label = f"{word}:" if word else ""
    # What was seen may hold whatever a policy wrote.
    plain = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return fill(plain, LINE_WIDTH, initial_indent=f"      {label:<6}", subsequent_indent=" " * 12)


def format_counts(results: Iterable[Result]) -> str:
    """Give how many passed, failed and were skipped, and how long it took."""
    found = list(results)
    by = Counter(result.status for result in found)
    told = ", ".join(f"{by[status]} {status}" for status in ("passed", "failed", "skipped") if by[status])
    return f"{told or 'nothing checked'} in {sum(result.seconds for result in found):.1f} s"


def format_report(report: Report, *, failed_only: bool = False) -> str:
    """Give the whole report; with *failed_only* without the checks that found nothing."""
    shown = [result for result in report.results if result.status == "failed" or not failed_only]
    blocks = [each for result in shown for each in (format_summary(result), *format_details(result))]
    return "\n".join([*blocks, format_counts(report.results)])
