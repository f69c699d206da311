"""The definition of a check, the results of checks, and their report as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict

from gymsdk.checks.subject import Subject

Status: TypeAlias = Literal["passed", "failed", "skipped"]
"""How a check ended. The result of a skipped check says why."""

STATUS_MARKS = {"passed": "ok", "failed": "FAIL", "skipped": "skip"}

MAX_FINDINGS = 5
"""How many findings of one check are shown."""

LINE_WIDTH = 110


CONSTANT_JUDGE = (
    "the judge gives every request the same answer, so the rewards say nothing about the environment; pass a judge that"
    " compares, for example --set judge=scripted/script:FILE with a line `when` for each right answer"
)


class NotApplicable(Exception):
    """The check does not apply to the environment; the message says why."""


def _escape_surrogates(text: str) -> str:
    """Escape lone surrogates, which a policy may write and no file can store."""
    return text.encode("utf-8", "backslashreplace").decode()


EscapedText: TypeAlias = Annotated[str, BeforeValidator(_escape_surrogates)]


class Finding(BaseModel):
    """One problem: the observation, its task, and a fix if the check's own advice is too general."""

    model_config = ConfigDict(frozen=True)

    problem: EscapedText
    task: EscapedText = ""
    fix: EscapedText = ""


def excuse_rewards(subject: Subject, about_rewards: Sequence[Finding], others: Sequence[Finding] = ()) -> list[Finding]:
    """Return all findings, without those *about_rewards* if the judge gives every request the same answer.

    Raises:
        NotApplicable: The judge is the only reason for the findings.
    """
    if not (about_rewards and subject.answers.is_constant):
        return [*about_rewards, *others]
    if not others:
        raise NotApplicable(CONSTANT_JUDGE)
    return [*others]


CheckFunction: TypeAlias = Callable[[Subject], Awaitable[list[Finding]]]
"""Checks a subject and returns its findings. Raises `NotApplicable` if the check does not apply."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        id: `packaging.*`, `runtime.*` or `semantic.*`. Where OpenEnv's RFC 008 defines the same check, its id.
        requirement: The requirement as a sentence.
        why: Why the requirement matters.
        fix: How to fix the findings.
        run: The function that runs the check.
        needs: The packages of the extra `author` that the check imports.
        seconds: The time limit in seconds.
        loads: Whether the check needs the environment to load.
    """

    id: str
    requirement: str
    why: str
    fix: str
    run: CheckFunction
    needs: tuple[str, ...] = ()
    seconds: float = 120.0
    loads: bool = True


class Result(BaseModel):
    """The result of one check.

    *reason* says why the check was skipped, *seconds* how long it took, and *warnings* lists the warnings of gymsdk
    during the check.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    requirement: str
    status: Status
    why: str = ""
    fix: str = ""
    findings: list[Finding] = []
    reason: EscapedText = ""
    warnings: list[EscapedText] = []
    seconds: float = 0.0


class Report(BaseModel):
    """The results of all checks of one environment."""

    model_config = ConfigDict(frozen=True)

    environment: str
    version: str
    seed: int
    results: list[Result]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(result.status != "failed" for result in self.results)


def format_summary(result: Result) -> str:
    """Return one line: the status, the id, and the requirement or the reason why the check was skipped."""
    text = result.reason if result.status == "skipped" else result.requirement
    return f"{STATUS_MARKS[result.status]:<4}  {result.id:<32}  {text}"


def format_details(result: Result) -> Iterator[str]:
    """Yield the lines below the summary: the findings, why they matter, how to fix them, and warnings."""
    for finding in result.findings[:MAX_FINDINGS]:
        location = f"  [{finding.task}]" if finding.task else ""
        yield _wrap_line("problem", f"{finding.problem}{location}")
    if len(result.findings) > MAX_FINDINGS:
        yield _wrap_line("", f"and {len(result.findings) - MAX_FINDINGS} more")
    if result.findings:
        yield _wrap_line("why", result.why)
        fixes = dict.fromkeys(finding.fix for finding in result.findings if finding.fix)
        yield from (_wrap_line("fix", fix) for fix in fixes or [result.fix])
    yield from (_wrap_line("warn", warning) for warning in result.warnings)


def _wrap_line(word: str, text: str) -> str:
    label = f"{word}:" if word else ""
    # A finding may quote anything that a policy wrote.
    plain = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return fill(plain, LINE_WIDTH, initial_indent=f"      {label:<9}", subsequent_indent=" " * 15)


def format_counts(results: Iterable[Result]) -> str:
    """Return how many checks passed, failed and were skipped, and how long they took."""
    listed = list(results)
    count_by_status = Counter(result.status for result in listed)
    parts = ", ".join(
        f"{count_by_status[status]} {status}" for status in ("passed", "failed", "skipped") if count_by_status[status]
    )
    return f"{parts or 'nothing checked'} in {sum(result.seconds for result in listed):.1f} s"


def format_report(report: Report, *, failed_only: bool = False) -> str:
    """Return the whole report; with *failed_only*, only the failed checks."""
    shown = [result for result in report.results if result.status == "failed" or not failed_only]
    blocks = [block for result in shown for block in (format_summary(result), *format_details(result))]
    return "\n".join([*blocks, format_counts(report.results)])
