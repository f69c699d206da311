"""Presence: whether the client that asked is still there to be answered."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from gymsdk.servers.app import GONE, Refused

T = TypeVar("T")


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Give what *work* gives; it is cancelled where the client of *request*, its body read, goes away before."""
    asking, gone = asyncio.current_task(), False
    assert asking is not None, "a request is answered in a task"

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        asking.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        asking.uncancel()
        raise Refused(GONE, "the client went away before the answer") from None
    finally:
        watching.cancel()
