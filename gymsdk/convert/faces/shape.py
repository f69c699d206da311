"""A shape: what must stand at a place in a body, or the sentence that says what is wrong there."""

from __future__ import annotations

from typing import Any

from gymsdk.transcript import Item

from .face import Malformed


def text(body: Item, key: str, where: str = "") -> str:
    """Give the string at *key* of *body*, which stands at *where*."""
    value = body.get(key)
    if isinstance(value, str):
        return value
    raise wrong(_path(where, key), "a string")


def object_(body: Item, key: str, where: str = "") -> Item:
    """Give the object at *key* of *body*, an empty one where there is none."""
    value = body.get(key)
    if value is None:
        return {}
    if isinstance(value, dict):
        return value
    raise wrong(_path(where, key), "an object")


def objects(value: Any, where: str) -> list[Item]:
    """Give the list of objects that *value*, at *where*, must be."""
    if not isinstance(value, list):
        raise wrong(where, "a list")
    for number, each in enumerate(value):
        if not isinstance(each, dict):
            raise wrong(f"{where}.{number}", "an object")
    return value


def wrong(where: str, what: str) -> Malformed:
    """The refusal of something at *where* that must be *what*."""
    return Malformed(f"{where} must be {what}", param=where)


def _path(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key
