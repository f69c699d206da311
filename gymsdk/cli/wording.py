"""Wording: what the reader of the command line complains of, in the words of whoever typed it."""

from __future__ import annotations

import re
from typing import Any

from typer import BadParameter
from typer.core import TyperGroup

from gymsdk.errors import suggestion

CHOICE = re.compile(r"(?P<given>'[^']*') is not one of (?P<known>.*?)\.?", re.DOTALL)


class Commands(TyperGroup):
    """The commands; a wrong value of theirs is told with the nearest right one."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except BadParameter as error:
            error.message = mended(error.message)
            raise


def mended(message: str) -> str:
    """Give *message* without the reader's own terms, and with the nearest of what could have been chosen."""
    told = message.removeprefix("Value error, ")
    found = CHOICE.fullmatch(told)
    if found is None:
        return told
    near = suggestion(found["given"].strip("'"), re.findall(r"'([^']*)'", found["known"]))
    return f"{found['given']} is not one of {found['known']}{near}" if near else told
