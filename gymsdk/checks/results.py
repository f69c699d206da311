"""The results of single checks of a server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from gymsdk.errors import GymsdkError

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]


class CheckResult(BaseModel):
    """The result of one check.

    Attributes:
        component: The number of the component, from 1.
        name: The property that is checked.
        outcome: Whether it passed.
        detail: The measurement, or the reason why the check failed or was skipped.
    """

    model_config = ConfigDict(frozen=True)

    component: int
    name: str
    outcome: Outcome
    detail: str


class CheckFailed(Exception):
    """A check found a defect; its message says which, and what to change."""


class CheckSkipped(Exception):
    """A check does not apply, or it cannot decide; its message says why."""


async def run_check(component: int, name: str, check: Callable[[], Awaitable[str]]) -> CheckResult:
    """Return the result of *check*, which returns its measurement."""
    outcome: Outcome
    try:
        outcome, detail = "passed", await check()
    except CheckSkipped as skipped:
        outcome, detail = "skipped", str(skipped)
    except (CheckFailed, GymsdkError) as error:
        outcome, detail = "failed", str(error)
    return CheckResult(component=component, name=name, outcome=outcome, detail=detail)
