"""Fails semantic.canary_floor (and semantic.floor_gap): a tool raises an exception for an unexpected value."""

from checks.bases.sums import *


async def digit(
    of: Annotated[int, Field(description="The number.")],
    place: Annotated[int, Field(description="Which digit, from 0.")],
) -> str:
    """Give one digit of a number, counted from the left."""
    return str(of)[place]


@hookimpl
def tools():
    return [digit]
