"""A report as people read it: a line for each check, beneath it what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from textwrap import fill

from gymsdk.checks.check import Report, Result

MARKS = {"passed": "ok", "failed": "FAIL", "skipped": "skip"}

MOST = 5
"""Findings of one check that are shown."""

WIDTH = 110


def line(result: Result) -> str:
    """Give the line of one check."""
    told = result.reason if result.status == "skipped" else result.asks
    return f"{MARKS[result.status]:<4}  {result.id:<32}  {told}"


def beneath(result: Result) -> Iterator[str]:
    """Yield what stands beneath that line: what was seen, why it matters, how to mend it, what was warned of."""
    for finding in result.findings[:MOST]:
        where = f"  [{finding.task}]" if finding.task else ""
        yield _told("seen", f"{finding.seen}{where}")
    if len(result.findings) > MOST:
        yield _told("", f"and {len(result.findings) - MOST} more")
    if result.findings:
        yield _told("why", result.why)
        mends = dict.fromkeys(finding.mend for finding in result.findings if finding.mend)
        yield from (_told("mend", mend) for mend in mends or [result.mend])
    yield from (_told("warn", warning) for warning in result.warnings)


def _told(word: str, text: str) -> str:
    label = f"{word}:" if word else ""
    # What was seen may hold whatever a policy wrote.
    plain = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    return fill(plain, WIDTH, initial_indent=f"      {label:<6}", subsequent_indent=" " * 12)


def counts(results: Iterable[Result]) -> str:
    """Give how many passed, failed and were skipped, and how long it took."""
    found = list(results)
    by = Counter(result.status for result in found)
    told = ", ".join(f"{by[status]} {status}" for status in ("passed", "failed", "skipped") if by[status])
    return f"{told or 'nothing checked'} in {sum(result.seconds for result in found):.1f} s"


def text(report: Report, *, failed_only: bool = False) -> str:
    """Give the whole report; with *failed_only* without the checks that found nothing."""
    shown = [result for result in report.results if result.status == "failed" or not failed_only]
    blocks = [each for result in shown for each in (line(result), *beneath(result))]
    return "\n".join([*blocks, counts(report.results)])
