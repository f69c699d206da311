"""The process: what belongs to all of it, pictured, compared and put back."""

from __future__ import annotations

import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from gymsdk.checks.plain import Plain, plain


def _folder() -> str:
    try:
        return os.getcwd()  # noqa: PTH109  # what is compared is the name
    except FileNotFoundError:
        return "(removed)"


def _numpy() -> Plain:
    numpy = sys.modules.get("numpy")
    return plain(numpy.random.get_state(legacy=False)) if numpy else None


LEFT_ALONE: dict[str, Callable[[], object]] = {
    "os.environ": lambda: dict(os.environ),
    "the current folder": _folder,
    "sys.path": lambda: list(sys.path),
    "the state of the global `random`": random.getstate,
    "the state of the global `numpy.random`": _numpy,
    "the handler of SIGINT": partial(signal.getsignal, signal.SIGINT),
    "the handler of SIGTERM": partial(signal.getsignal, signal.SIGTERM),
    "the handler of SIGALRM": partial(signal.getsignal, signal.SIGALRM),
    "warnings.filters": lambda: list(warnings.filters),
}
"""What belongs to the whole process: no episode may change it."""


def pictured() -> dict[str, object]:
    """Give what belongs to the whole process, as it is now."""
    return {name: look() for name, look in LEFT_ALONE.items()}


@contextmanager
def put_back() -> Iterator[None]:
    """Put the variables, the folder and the path back as they were before the block.

    What an episode changes once and for all would otherwise be found by nobody: the first to look finds it changed.
    """
    variables, folder, path = dict(os.environ), _folder(), list(sys.path)
    try:
        yield
    finally:
        _restore(variables, folder, path)


def _restore(variables: dict[str, str], folder: str, path: list[str]) -> None:
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update({name: value for name, value in variables.items() if os.environ.get(name) != value})
    if os.path.isdir(folder) and _folder() != folder:  # noqa: PTH112  # as above
        os.chdir(folder)
    if sys.path != path:
        sys.path[:] = path


@contextmanager
def stirred() -> Iterator[None]:
    """Put the global generators where no episode has left them: one that seeds them as before changes nothing else."""
    generators = (random, numpy.random) if (numpy := sys.modules.get("numpy")) else (random,)
    kept = [random.getstate(), *(each.get_state() for each in generators[1:])]
    for each in generators:
        each.seed(int.from_bytes(os.urandom(4), "big"))
    try:
        yield
    finally:
        random.setstate(kept[0])
        for each, state in zip(generators[1:], kept[1:], strict=True):
            each.set_state(state)
