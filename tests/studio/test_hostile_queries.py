"""Every query parameter of the viewer with values that no page sends: the answer names the parameter, or fits it."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from gymsdk.errors import UsageError
from gymsdk.rollouts.replay import parse_turn

from .conftest import Viewer, start_viewer

HUGE = "9" * 30
MANY = ",".join(["1"] * 2000)
CONDITIONS: tuple[tuple[str, str], ...] = (
    ('[["reward","=",[]]]', "the value of 'reward'"),
    ('[["reward",[],1]]', "no operator"),
    ('[["reward",{},1]]', "no operator"),
    ('[[{},"=",1]]', "no field"),
    ('[["lens","=",[]]]', "lens=NAME"),
    ('[["lens","=",{}]]', "lens=NAME"),
    (f'[["id","=",{HUGE}]]', "at most 64 bits"),
    (f'[["id","in",[1,-{HUGE}]]]', "at most 64 bits"),
    (f'[["figure:x","<",{HUGE}]]', "at most 64 bits"),
    (f'[["id","in",[{MANY}]]]', "at most 1,000"),
    ("[" + ",".join(['["id","=",1]'] * 500) + "]", "at most 100"),
    ('[["prompt","=","\\ud800"]]', "not JSON"),
    ('[["figure:\\ud800","=",1]]', "not JSON"),
    ("[" * 5000, "not JSON"),
)


@pytest.fixture
def client(shared_viewer: Viewer) -> Iterator[httpx.Client]:
    with shared_viewer.client() as opened:
        yield opened


@pytest.mark.parametrize("path", ["rows", "facets", "tasks", "tools", "failures"])
def test_an_impossible_condition_is_refused_with_its_reason(client: httpx.Client, path: str) -> None:
    for where, reason in CONDITIONS:
        answer = client.get(f"/api/runs/run/{path}", params={"where": where})
        assert (answer.status_code, reason in answer.json()["detail"]) == (400, True), (where[:80], answer.text[:200])


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("rows", ("offset", "limit")),
        ("tasks", ("offset", "limit")),
        ("rollouts/0:0/items", ("from", "n")),
    ],
)
def test_an_impossible_number_is_refused_with_its_parameter(
    client: httpx.Client, path: str, names: tuple[str, ...]
) -> None:
    for name in names:
        for value in (HUGE, "9" * 5000, "1.5", "nan", "[]", "x"):
            answer = client.get(f"/api/runs/run/{path}", params={name: value})
            assert (answer.status_code, f"`{name}`" in answer.json()["detail"]) == (400, True), (name, value[:40])
        for value in ("", "-1", f"-{HUGE}", "0", "9" * 18):
            assert client.get(f"/api/runs/run/{path}", params={name: value}).status_code == 200


@pytest.mark.parametrize(
    "name",
    [f"#{HUGE}", f"{HUGE}:0", f"0:{HUGE}", "#", ":", "#x", "²:0", "#²", "0:0:0", "%00", "\x00", "-1:0", "9" * 5000],
)
def test_an_impossible_rollout_is_not_found(client: httpx.Client, name: str) -> None:
    for path in ("", "/items", "/tokens"):
        answer = client.get(f"/api/runs/run/rollouts/{quote(name, safe='')}{path}")
        assert answer.status_code == 404, answer.text[:200]


@pytest.mark.parametrize(
    "text", ["a " * 400, "ab " * 5000, "K" * 30_000, '"', "*", "NEAR(", "a\x00b", "a OR", "\u0130", "(" * 500]
)
def test_any_text_can_be_searched_or_is_too_long(client: httpx.Client, text: str) -> None:
    answer = client.get("/api/runs/run/rows", params={"q": text})
    assert answer.status_code == (400 if len(text) > 1000 else 200), answer.text[:200]


def test_too_many_figures_are_refused(client: httpx.Client) -> None:
    for names, status in ([["x"] * 501, 400], [["x"] * 500, 200], [["\ud800"], 400], [[1], 400]):
        answer = client.get("/api/runs/run/rows", params={"figures": json.dumps(names)})
        assert answer.status_code == status, answer.text[:200]


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"type": "message", "role": "assistant", "content": [1]}, "items.0.content"),
        ({"type": "function_call", "name": []}, "items.0.name"),
        ({"role": {}, "content": "x"}, "items.0.role"),
    ],
)
def test_the_turn_of_a_branch_has_readable_items(item: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=f"the next turn: `{field}`"):
        parse_turn(json.dumps([item]).encode(), where="the next turn")


def test_a_client_that_disconnects_leaves_no_traceback(strong: Path, tmp_path: Path) -> None:
    # The viewer's log must be empty at its end.
    with start_viewer(strong, cache=tmp_path / "cache") as viewer:
        host, port = viewer.base.removeprefix("http://").split(":")
        lines = [
            "POST /api/runs/strong/notes HTTP/1.1",
            f"Host: {host}:{port}",
            f"Authorization: Bearer {viewer.token}",
        ]
        lines += ["Content-Type: application/json", "Content-Length: 99", "", ""]
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall("\r\n".join(lines).encode() + b'{"id":')
        with viewer.client() as client:
            assert client.get("/api/runs/strong/notes").json() == []
