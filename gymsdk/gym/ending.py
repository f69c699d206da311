"""The end of what nobody closed: an episode that is deleted, or open when the interpreter ends, is closed then."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple

from gymsdk.gym import loop

Ts = TypeVarTuple("Ts")

_open: set[weakref.finalize[Any, Any]] = set()


def unclosed(owner: object, close: Callable[[*Ts], Coroutine[Any, Any, None]], *given: *Ts) -> None:
    """Have `close(*given)` run on the background loop once *owner* is gone or this process ends.

    Nothing that is *given* may hold the owner.
    """

    def end() -> None:
        _open.discard(finalizer)
        if process == os.getpid():
            loop.leave(close(*given))

    process = os.getpid()
    finalizer = weakref.finalize(owner, end)
    # At exit they all close at once, within one bound: `_end` sees to that.
    finalizer.atexit = False
    _open.add(finalizer)


@atexit.register
def _end() -> None:
    for finalizer in tuple(_open):
        # To call one does nothing by now.
        if alive := finalizer.detach():
            alive[1]()
    loop.shut()
