from __future__ import annotations

from .healthy import HEALTHY

CLOSING = "runtime.close_once"


async def test_a_healthy_environment_passes(subject, outcome):
    assert (await outcome(CLOSING, subject(HEALTHY))).status == "passed"


async def test_a_close_that_depends_on_a_step_is_found(subject, outcome):
    result = await outcome(CLOSING, subject(HEALTHY.replace("state.books.clear()", "state.books.pop()")))
    assert {"answered with nothing", "cancelled", "out of time"} <= {
        ending
        for finding in result.findings
        for ending in ("answered with nothing", "cancelled", "out of time")
        if ending in finding.problem
    }
    assert "IndexError" in result.findings[0].problem


async def test_equal_findings_are_reported_once(subject, outcome):
    result = await outcome(CLOSING, subject(HEALTHY.replace("state.books.clear()", "raise OSError('stuck')")))
    assert len({finding.problem for finding in result.findings}) == len(result.findings)
