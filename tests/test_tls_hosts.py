"""Redaction of credentials in URLs, and loopback hosts."""

from __future__ import annotations

import pytest

from gymsdk.http.tls import get_reachable_host, is_loopback, redact_url


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
    assert redact_url(text) == told


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"])
def test_a_host_that_only_this_machine_reaches_is_known(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.7", "::ffff:10.0.0.7", "node7", "127.0.0.1.test"])
def test_no_other_is_taken_for_one(host: str) -> None:
    assert not is_loopback(host)


def test_what_listens_everywhere_is_near() -> None:
    told = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "10.0.0.7": "10.0.0.7"}
    assert {host: get_reachable_host(host) for host in told} == told
