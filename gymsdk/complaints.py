"""What pydantic complains of, as one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError


def sentence(error: ValidationError) -> str:
    """Give every complaint of *error*, each behind the place it is about."""
    return "; ".join(f"{where}: {said(each)}" if (where := place(each)) else said(each) for each in error.errors())


def place(complaint: Mapping[str, Any]) -> str:
    """Give the place one complaint is about, as in `world.contacts.0.name`; nothing where it is about the whole."""
    return ".".join(map(str, complaint["loc"]))


def said(complaint: Mapping[str, Any]) -> str:
    """Give one complaint's own words."""
    message: str = complaint["msg"]
    return message.removeprefix("Value error, ")
