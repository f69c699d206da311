"""Fails runtime.descriptions: a tool has a name but no description."""

from checks.bases.sums import *


async def add(one: int, other: int) -> int:
    return one + other


@hookimpl
def tools():
    return [add]
