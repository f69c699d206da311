"""The catalog: every check there is, in the order they are run."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from gymsdk.checks import (
    blocking,
    closing,
    describing,
    determinism,
    faces,
    floor,
    isolation,
    leaks,
    loading,
    oracle,
    packaging,
    replay,
    resources,
    verifier,
)
from gymsdk.checks.check import Check
from gymsdk.errors import UsageError, suggestion

FAMILIES = (
    packaging,
    loading,
    describing,
    determinism,
    oracle,
    floor,
    verifier,
    leaks,
    isolation,
    replay,
    closing,
    blocking,
    resources,
    faces,
)

CHECKS: tuple[Check, ...] = tuple(check for family in FAMILIES for check in family.CHECKS)
"""Every check."""


def chosen(only: str | Iterable[str] = (), skip: str | Iterable[str] = ()) -> tuple[Check, ...]:
    """Give the checks named by *only*, all where it is empty, without those named by *skip*.

    A name is an id or the beginning of one before a dot, as in `packaging`. Raises `UsageError` for one that
    is none, and where nothing is left.
    """
    taken, left = _named(only), _named(skip)
    found = tuple(check for check in CHECKS if (check.id in taken or not taken) and check.id not in left)
    if not found:
        raise UsageError("nothing is left to check: what is skipped is all there is to run; skip less, or name more")
    return found


def ready(checks: Iterable[Check]) -> None:
    """Raise `UsageError` where one of *checks* needs a package that is not installed."""
    for check in checks:
        for package in check.needs:
            if find_spec(package) is None:
                raise UsageError(
                    f'the check {check.id} needs {package}: `pip install "gymsdk[author]"`, or leave the check out'
                    f" with --skip {check.id}"
                )


def _named(names: str | Iterable[str]) -> set[str]:
    ids = [check.id for check in CHECKS]
    found: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        meant = {each for each in ids if each == name or each.startswith(f"{name}.")}
        if not meant:
            raise UsageError(f"no check has the id {name!r}{suggestion(name, ids, '`gymsdk check --list` shows them')}")
        found |= meant
    return found
