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

import asyncio
import difflib
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

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
        return _rebuild_error, (type(self), self.args, self.__dict__)


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


def convert_error(
    error: EpisodeError, error_type: type[E], *, message: str | None = None, kind: str | None = None
) -> E:
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


def format_suggestion(name: str, known: Iterable[str], then: str = "") -> str:
    """`; did you mean 'x'?` when a known name is near *name*, else nothing; *then* follows, joined to either."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if nearest:
        return " ".join(filter(None, [f"; did you mean {nearest[0]!r}?", then[:1].upper() + then[1:]]))
    return f"; {then}" if then else ""


def _rebuild_error(kind: type[EpisodeError], args: tuple[object, ...], state: dict[str, object]) -> EpisodeError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(state)
    return error


INTERRUPTS = (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)
"""What ends the code that is running from outside.

Everything else that an author's code raises is an error of that code, also what is no `Exception`: `SystemExit`, or the
panic of a Rust extension.
"""

CALLING_LIBRARIES = ("pydantic", "pluggy")
"""Libraries by which gymsdk calls an author's code."""

MAX_REPORTED_ERRORS = 8
"""How many complaints a sentence names."""

MAX_ERROR_CHARS = 300
"""How many characters one complaint may take: it may quote what a policy wrote."""

MESSAGE_OVERRIDES = {
    "path_type": "Input should be a path",
    "tuple_type": "Input should be a list",
}
"""Complaints in the words of JSON and YAML, where pydantic has Python's."""


def format_validation_error(error: ValidationError) -> str:
    """Give the complaints of *error*, each behind the place it is about; the first of many."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    named = [
        _shorten(
            f"{where}: {format_error_detail(each)}"
            if (where := format_error_location(each))
            else format_error_detail(each)
        )
        for each in found[:MAX_REPORTED_ERRORS]
    ]
    more = [f"and {len(found) - MAX_REPORTED_ERRORS} more"] if len(found) > MAX_REPORTED_ERRORS else []
    return "; ".join(named + more)


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}…"


def format_error_location(complaint: Mapping[str, Any]) -> str:
    """Give the place one complaint is about, as in `world.contacts.0.name`; nothing where it is about the whole."""
    return ".".join(map(str, complaint["loc"]))


def format_error_detail(complaint: Mapping[str, Any]) -> str:
    """Give one complaint's own words."""
    if complaint["type"] in MESSAGE_OVERRIDES:
        return MESSAGE_OVERRIDES[complaint["type"]]
    message: str = complaint["msg"]
    return message.removeprefix("Value error, ")


def describe_exception(error: BaseException, function: Callable[..., Any] | None = None) -> str:
    """Give an error's type and message, and the line of the author's code that it comes from.

    Args:
        error: What the author's code raised.
        function: The author's function that was called, where it is known. Its package tells the author's lines from
            those of libraries. Without it, the package of the outermost line does, apart from gymsdk and `CALLERS`.
    """
    message = format_validation_error(error) if isinstance(error, ValidationError) else str(error)
    where = find_author_line(traceback.extract_tb(error.__traceback__), function)
    return f"{type(error).__name__}: {message}" + (f" ({where})" if where else "")


def find_author_line(frames: Sequence[traceback.FrameSummary], function: Callable[..., Any] | None = None) -> str:
    """Give the innermost line of the author's own code among *frames*, and the library's line where it ended."""
    foreign = [
        each for each in frames if not (_is_host_or_stdlib(Path(each.filename)) or each.filename.startswith("<frozen"))
    ]
    if not foreign:
        return ""
    first = next(
        (each for each in foreign if _find_package(Path(each.filename)).name not in CALLING_LIBRARIES), foreign[0]
    )
    home = _find_package(Path(_source_file(function) or first.filename))
    own = [frame for frame in foreign if _find_package(Path(frame.filename)) == home]
    if not own or own[-1] is foreign[-1]:
        return _format_position(foreign[-1])
    return f"{_format_position(own[-1])}, in a call that ended at {_format_library_position(foreign[-1])}"


def _source_file(function: Callable[..., Any] | None) -> str | None:
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    return code.co_filename if code else None


def _find_package(file: Path) -> Path:
    """Give the outermost package that *file* is in, or the file itself where it is a module of its own."""
    if not file.is_absolute():
        # Code made at run time is in no file: its frames are called `<string>` and the like.
        return file
    package = file
    while package.parent != package and (package.parent / "__init__.py").exists():
        package = package.parent
    return package


def _format_position(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _format_library_position(frame: traceback.FrameSummary) -> str:
    file = Path(frame.filename)
    return f"{file.relative_to(_find_package(file).parent)}:{frame.lineno}"


def _is_host_or_stdlib(file: Path) -> bool:
    """Whether *file* is the host's or Python's own, and no author's."""
    homes = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))
    return "site-packages" not in file.parts[len(homes[1].parts) :] and any(home in file.parents for home in homes)
