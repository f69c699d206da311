"""Redaction of credentials in URLs, and loopback hosts."""

from __future__ import annotations

import pytest

from gymsdk.http.tls import get_reachable_host, is_loopback, mask_url, redact_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:hush@host:1/v1", "http://host:1/v1"),
        ("endpoint/x@https://host/v1?key=hush", "endpoint/x@https://host/v1"),
        ("scripted/replay:a?b", "scripted/replay:a?b"),
        ("http://host/a@b", "http://host/a@b"),
        ("host/v1?key=hush&next=http://other", "host/v1"),
    ],
)
def test_user_and_query_are_removed_from_a_url(text: str, expected: str) -> None:
    assert redact_url(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("see http://me:hush@host:1/v1, and\nftp://x@y", "see http://***@host:1/v1, and\nftp://***@y"),
        ("(https://host/v1?key=hush) ok?", "(https://host/v1?*** ok?"),
        ("a://b,c://d:hush@e?f://g@h", "a://b,c://***@e?***"),
        ("http://host/a@b  me@host", "http://host/a@b  me@host"),
        ("db=me:hu@sh@db:5432/x, 'b:hush@[::1]' :hush@h", "***@db:5432/x, '***@[::1]' ***@h"),
        ("https://me:hu@sh@h/a@b", "https://***@h/a@b"),
        ("python:3@sha256:0f a/m:7b@http://h git@h:a", "python:3@sha256:0f a/m:7b@http://h git@h:a"),
        ("://" * 300_000 + "?hush", "://" * 300_000 + "?***"),
        ("a:" + "@a:" * 200_000, "a:" + "@a:" * 200_000),
        ("a:" * 300_000, "a:" * 300_000),
    ],
    ids=["users", "query", "several", "no user", "no scheme", "an @ in it", "no password", *"123"],
)
def test_users_and_queries_of_urls_in_a_text_are_masked(text: str, expected: str) -> None:
    assert mask_url(text) == expected


def test_loopback_hosts_are_recognized() -> None:
    loopback = ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"]
    others = ["", "0.0.0.0", "::", "10.0.0.7", "::ffff:10.0.0.7", "node7", "127.0.0.1.test"]
    assert [host for host in [*loopback, *others] if is_loopback(host)] == loopback


def test_a_wildcard_address_is_reached_through_loopback() -> None:
    expected = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1", "10.0.0.7": "10.0.0.7"}
    assert {host: get_reachable_host(host) for host in expected} == expected
