"""Waiting: for what an instance answers, for as long as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from gymsdk import http
from gymsdk.errors import Failed

T = TypeVar("T")

WATCH = 1.0
"""Seconds between two looks whether the instance that is waited for is still there."""

COMING = 5.0
"""Seconds that a call waits for an instance where there is none."""

LOOKING = 0.25
"""Seconds between two looks for one meanwhile."""

LATER = 5.0
"""Seconds after which it is worth asking again where there is none."""

ASKED = 2.0
"""Seconds in which an instance that the head does not know any more has to say that it is there."""

MISSES = 3
"""How many times in a row it may be silent before it is gone: one silence may be an overload, here or there."""

UNAUTHORIZED = 401
"""The status of a server that is there, and wants a token to say more."""


class Gone(Failed):
    """Nobody is there any more who could answer."""


async def answered(
    asked: Coroutine[Any, Any, T], url: str, known: Callable[[], Awaitable[bool]], *, watch: float = WATCH
) -> T:
    """Give what is answered to what was *asked* at *url*, looked at each *watch* seconds; raises `Gone`.

    Whom the head has *known* no more, and who does not say by itself that it is there, is waited for no longer: a
    machine that lost its power says nothing, and its connections last as long as an answer may take. A server that
    refuses connections is gone at once, a silent one only after several misses.
    """
    asking, misses = asyncio.ensure_future(asked), 0
    try:
        while not (await asyncio.wait({asking}, timeout=watch))[0]:
            misses = 0 if await known() else misses + await _missed(url)
            if misses >= MISSES and not asking.done():
                sentence = f"{http.host(url)} is gone: neither the head knows it any more, nor does it answer"
                raise Gone(sentence, kind="server_unreachable")
        return asking.result()
    finally:
        asking.cancel()


async def _missed(url: str) -> int:
    """Give how much the silence of what is at *url* counts: it may have left the head, and end what it has."""
    try:
        return 0 if await lives(url) else MISSES
    except http.Unsent:
        return MISSES
    except Failed:
        return 1


async def lives(url: str) -> bool:
    """Whether what is at *url* answers as a server of ours does; raises `Failed` where it does not answer in time."""
    answer = await http.get(url.rstrip("/") + "/livez", timeout=ASKED, retry=http.ONCE)
    return answer.ok or answer.status == UNAUTHORIZED
