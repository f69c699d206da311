"""Addresses are told without who asks."""

from __future__ import annotations

import pytest

from gymsdk.addresses import public


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("http://me:hush@host:1/v1", "http://host:1/v1"),
        ("endpoint/x@https://host/v1?key=hush", "endpoint/x@https://host/v1"),
        ("scripted/replay:a?b", "scripted/replay:a?b"),
        ("http://host/a@b", "http://host/a@b"),
    ],
)
def test_who_asks_and_a_query_are_left_out(text: str, told: str) -> None:
    assert public(text) == told
