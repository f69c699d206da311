"""Every way gymsdk can fail.

GymsdkError
├── UsageError               wrong input: the command line answers with exit code 2
│   ├── UnknownEnvironment   no installed environment has that name
│   ├── UnknownModel         no provider or policy has that name
│   ├── UnknownSplit         the environment has no such split
│   ├── BadConfig            a setting of an environment or a deployment is missing, misspelt or wrong
│   ├── BadRow               a task row does not fit the environment
│   ├── BadModelOption       a model's option or endpoint is missing or wrong
│   └── BadOutput            the output folder cannot be used, or holds a run with other settings
├── ModelLost                a run stopped early: its model gives no answers
├── BrokenEnvironment        an installed environment cannot be loaded
└── EpisodeError             one episode could not be played to a reward
    ├── Failed               the model, a tool or the environment broke
    └── Unscorable           the grader could not decide
        ├── BudgetSpent      an offloaded call used up its own CPU or memory
        └── WorkerLost       an offloaded call lost its worker, or its wall clock, to something else
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable


class GymsdkError(Exception):
    """Anything gymsdk raises on purpose."""


class UsageError(GymsdkError):
    """Wrong input; the message says which and what to do.

    Where settings are wrong, *about* has a sentence for each, by the keys that lead to it.
    """

    setting_errors: tuple[tuple[tuple[str, ...], str], ...] = ()


class UnknownEnvironment(UsageError):
    """No installed environment has that name."""


class UnknownModel(UsageError):
    """No provider or policy has that name."""


class UnknownSplit(UsageError):
    """The environment has no such split."""


class BadConfig(UsageError):
    """A setting of an environment or a deployment is missing, misspelt or wrong."""


class BadRow(UsageError):
    """A task row does not fit the environment."""


class BadModelOption(UsageError):
    """A model's option or endpoint is missing or wrong."""


class BadOutput(UsageError):
    """The output folder cannot be used."""


class BrokenEnvironment(GymsdkError):
    """An installed environment cannot be loaded; the message names it."""


class ModelLost(GymsdkError):
    """A run stopped early, since its model gives no answers; what has finished is on disk."""


class EpisodeError(GymsdkError):
    """One episode could not be played to a reward.

    *kind* is a short machine-readable word (`hook_timeout`, `model_unreachable`, `judge_failed`, …),
    *stage* where it happened (`reset`, `model`, `step`, `verify`, `close`; filled in by the host),
    *retryable* whether the same episode may go well another time, *retry_after* in how many seconds at the soonest.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str,
        retryable: bool = False,
        stage: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.retryable = retryable
        self.stage = stage
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[object, ...]:
        """Give how to make the error again elsewhere: what an exception gives by itself leaves the kind out."""
        return _remade, (type(self), self.args, self.__dict__)


class Failed(EpisodeError):
    """The model, a tool or the environment broke."""


class Unscorable(EpisodeError):
    """The grader could not decide: raised in `verify`, it is never a reward of 0."""

    def __init__(
        self,
        message: str,
        *,
        kind: str = "unscorable",
        retryable: bool = False,
        stage: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message, kind=kind, retryable=retryable, stage=stage, retry_after=retry_after)


E = TypeVar("E", Failed, Unscorable)


def recast(error: EpisodeError, error_type: type[E], *, message: str | None = None, kind: str | None = None) -> E:
    """Give *error* as one of another type, all that is not given anew kept."""
    return error_type(
        message or str(error),
        kind=kind or error.kind,
        retryable=error.retryable,
        stage=error.stage,
        retry_after=error.retry_after,
    )


class BudgetSpent(Unscorable):
    """An offloaded call used up its own CPU or memory: the input was too much for it, whatever the load."""


class WorkerLost(Unscorable):
    """An offloaded call lost its worker, or its wall clock, to something other than its own work."""


def suggestion(name: str, known: Iterable[str], then: str = "") -> str:
    """`; did you mean 'x'?` when a known name is near *name*, else nothing; *then* follows, joined to either."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if nearest:
        return " ".join(filter(None, [f"; did you mean {nearest[0]!r}?", then[:1].upper() + then[1:]]))
    return f"; {then}" if then else ""


def _remade(kind: type[EpisodeError], args: tuple[object, ...], state: dict[str, object]) -> EpisodeError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error
