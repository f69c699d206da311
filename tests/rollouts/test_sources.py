from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from gymsdk import Environment, ServerClient
from gymsdk.client import UnknownServer
from gymsdk.errors import BadRow, UnknownSplit
from gymsdk.rollouts.remote import HeadServers
from gymsdk.rollouts.reverify import has_judges
from gymsdk.rollouts.tasks import MAX_SAMPLED_LINES, get_default_split, has_agents, list_wanted, read_file, read_splits

GOOD = {"responses_create_params": {"input": "2 + 2"}, "answer": 4, "extra": {"kept": [1]}}

SPLITS = """
class Sum(Task):
    answer: int

@hookimpl
def tasks(split: Literal["train", "example"], seed: int):
    for number in range(5):
        yield Sum.ask(f"{split} {seed}", answer=number)

@hookimpl
def verify(task: Sum):
    return Verdict(reward=0.0)
"""


@pytest.fixture
def sums(environment: Callable[..., Environment]) -> Mapping[str, Environment]:
    return {"sums": environment(SPLITS)}


@pytest.fixture
def task_file(tmp_path: Path) -> Callable[..., Path]:
    def write(*rows: Any) -> Path:
        path = tmp_path / "tasks.jsonl"
        texts = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
        path.write_bytes(b"\n".join(texts) + b"\n")
        return path

    return write


def test_a_split_is_read_up_to_the_limit(sums: Mapping[str, Environment]) -> None:
    rows = list(read_splits(sums, "train", seed=3, limit=2))
    assert [(name, row["answer"]) for name, row in rows] == [("sums", 0), ("sums", 1)]
    assert rows[0][1]["responses_create_params"]["input"][0]["content"] == "train 3"
    both = {**sums, "more": sums["sums"]}
    assert [name for name, _ in read_splits(both, None, seed=0, limit=2)] == ["sums", "sums", "more", "more"]


def test_the_default_split_is_example_or_the_first(
    sums: Mapping[str, Environment], environment: Callable[..., Environment]
) -> None:
    assert get_default_split(sums["sums"]) == "example"
    assert get_default_split(environment(SPLITS.replace('"example"', '"test"'))) == "train"
    bare = environment("@hookimpl\ndef verify():\n    return Verdict(reward=0.0)\n")
    with pytest.raises(UnknownSplit, match="has no splits; name a task file with --tasks"):
        get_default_split(bare)
    with pytest.raises(UnknownSplit, match="trian"):
        list(read_splits(sums, "trian", seed=0, limit=1))


def test_rows_of_a_file_keep_every_field(sums: Mapping[str, Environment], task_file: Callable[..., Path]) -> None:
    assert list(read_file(sums, task_file(GOOD, b"", GOOD), limit=None)) == [("sums", GOOD)] * 2
    assert len(list(read_file(sums, task_file(GOOD, GOOD, b"{broken"), limit=2))) == 2


BAD = {
    "not valid JSON": b"{broken",
    "surrogates not allowed": b"\xff\xfe",
    "expected a JSON object, got list": b"[1]",
    "responses_create_params": {"answer": 4},
    "answer": {**GOOD, "answer": "four"},
    "`input` must be": {**GOOD, "responses_create_params": {"input": 3}},
}


@pytest.mark.parametrize("expected", BAD)
def test_a_bad_row_is_reported_with_its_file_and_line(
    sums: Mapping[str, Environment], task_file: Callable[..., Path], expected: str
) -> None:
    path = task_file(GOOD, b"", BAD[expected])
    with pytest.raises(BadRow) as caught:
        list(read_file(sums, path, limit=None))
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert expected in message
    assert "\n" not in message


def test_bad_rows_can_be_skipped(sums: Mapping[str, Environment], task_file: Callable[..., Path]) -> None:
    reported: list[BadRow] = []
    rows = list(read_file(sums, task_file(GOOD, *BAD.values(), GOOD), limit=2, bad=reported.append))
    assert len(rows) == 2
    assert [str(error).split(": ")[0].rpartition(":")[2] for error in reported] == ["2", "3", "4", "5", "6", "7"]


def test_a_row_must_name_its_environment_if_there_are_several(
    sums: Mapping[str, Environment], task_file: Callable[..., Path]
) -> None:
    both = {**sums, "more": sums["sums"]}
    path = task_file(
        {**GOOD, "agent_ref": {"name": "more_simple_agent"}}, {**GOOD, "agent_ref": {"name": "sums"}}, GOOD
    )
    rows = read_file(both, path, limit=None)
    assert [next(rows)[0], next(rows)[0]] == ["more", "sums"]
    with pytest.raises(BadRow, match=r":3: with several environments, a row must name one of sums, more"):
        next(rows)


def test_the_agents_named_in_a_file_are_listed_once_each(task_file: Callable[..., Path]) -> None:
    named = {**GOOD, "agent_ref": {"name": "sums_simple_agent"}}
    path = task_file(b"{torn", GOOD, named, named)
    assert list_wanted(["sums"], path, limit=None, agent=None) == [(None, "sums"), ("sums_simple_agent", "sums")]
    assert list_wanted(["sums"], path, limit=1, agent=None) == [(None, "sums")]
    assert list_wanted([], path, limit=None, agent="mine") == [("mine", "mine"), ("sums_simple_agent", "sums")]
    torn = task_file(*[b"{torn"] * MAX_SAMPLED_LINES, GOOD)
    assert list_wanted(["sums"], torn, limit=None, agent=None) == []


@pytest.mark.parametrize(
    ("wanted", "known"),
    [([], True), ([(None, "sums")], True), ([("sumz", "sums")], True), ([(None, "sums"), ("sumz", "sumz")], False)],
)
def test_servers_have_all_agents_of_a_file_or_lack_one(wanted: list[tuple[str | None, str]], *, known: bool) -> None:
    served = HeadServers(ServerClient(), {"sums_simple_agent": "sums"}, {"sums": "sums"})
    assert has_agents(served, wanted) is known
    assert has_judges(served, wanted) is known


@pytest.mark.parametrize(
    ("agents", "resources", "agent"),
    [
        ({"sums_simple_agent": "sums", "mine": "sums"}, {"sums": "sums"}, "sums_simple_agent"),
        ({"mine": "sums"}, {"sums": "sums"}, "mine"),
        ({"example_simple_agent": "example"}, {"example": "sums"}, "example_simple_agent"),
        # The server with the name of the environment comes before others that serve it.
        ({"mine": "sums", "other": "example"}, {"sums": "other", "example": "sums"}, "mine"),
        ({"mine": "example"}, {"example": "other"}, None),
        ({"mine": None}, {}, None),
    ],
)
def test_the_agent_of_an_environment_is_found_whatever_its_name(
    agents: dict[str, str | None], resources: dict[str, str], agent: str | None
) -> None:
    served = HeadServers(ServerClient(), agents, resources)
    if agent is None:
        with pytest.raises(UnknownServer, match="knows no agent"):
            served.check_environments(["sums"])
        return
    served.check_environments(["sums"])
    for named in (None, "sums", "sums_simple_agent"):
        assert served.get_agent(named, "sums") == agent
        assert served.get_resources(named, "sums") == agents[agent]


def test_several_agents_of_an_environment_are_listed() -> None:
    served = HeadServers(ServerClient(), {"a": "sums", "b": "sums"}, {"sums": "sums"})
    with pytest.raises(UnknownServer, match="has several agents for 'sums': a, b; name one with --agent"):
        served.get_agent(None, "sums")
    assert served.get_agent("b", "sums") == "b"
    served = HeadServers(ServerClient(), {"a": "mine"}, {"mine": "example_single_tool_call"})
    assert served.get_agent(None, "tool_call") == served.get_agent(None, "example_single_tool_call") == "a"
