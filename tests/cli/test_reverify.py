from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.conftest import Command, Start


@pytest.fixture
def played(gymsdk: Command, there: Path) -> Path:
    """A run of four rollouts, of which some are wrong."""
    assert gymsdk("rollout", "sums", "--limit", 2, "-k", 2, "--model", "scripted/oracle:0.5", "-o", "out").code == 0
    return there / "out"


@pytest.fixture
def head(start: Start) -> Callable[..., str]:
    """Serve `sums` as a process of its own, and give its head's address."""

    def begin(*words: object) -> str:
        process = start("serve", "sums", "--port", 0, "--json", *words)
        assert process.stdout is not None
        address: str = json.loads(process.stdout.readline())["head"]
        return address

    return begin


def _edited(folder: Path) -> None:
    """Give the first stored rollout another reward."""
    path = folder / "rollouts.jsonl"
    first, *others = map(json.loads, path.read_text().splitlines())
    first["reward"] = 0.5
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (first, *others)))


def test_reverify_leaves_the_stored_run_unchanged(gymsdk: Command, played: Path) -> None:
    before = {path.name: path.read_bytes() for path in played.iterdir()}
    ended = gymsdk("reverify", "out", "-o", "new.jsonl")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.splitlines()[0] == "4 rollouts verified again: 0 rewards changed, 0 have no reward now"
    assert {path.name: path.read_bytes() for path in played.iterdir()} == before
    new, old = ((path).read_text().splitlines() for path in (played.parent / "new.jsonl", played / "rollouts.jsonl"))
    assert list(map(json.loads, new)) == list(map(json.loads, old))


def test_changed_rewards_are_listed_and_fail_only_with_the_option(gymsdk: Command, played: Path) -> None:
    _edited(played)
    ended = gymsdk("reverify", "out")
    assert ended.code == 0
    assert ended.out.splitlines()[0].startswith("sums task ")
    assert ": 0.5 is now " in ended.out.splitlines()[0]
    told = json.loads(gymsdk("reverify", "out", "--json").out)
    (changed,) = told["changed"]
    assert (told["rollouts"], changed["line"], changed["old"], told["unscored"]) == (4, 1, 0.5, [])
    assert gymsdk("reverify", "out", "--fail-on-change").code == 1
    assert gymsdk("reverify", "out", "--limit", 1, "--json").out.count('"task"') == 1


def test_rollouts_without_a_new_reward_are_listed_with_their_reason(gymsdk: Command, played: Path) -> None:
    answers = sorted({json.loads(line)["answer"] for line in (played / "rollouts.jsonl").read_text().splitlines()})
    ended = gymsdk("reverify", "out", "--set", f"breaks=[{answers[0]}]", "-o", "new.jsonl")
    assert ended.code == 1
    assert (
        f"no reward (hook_raised): hook 'verify' of environment 'sums' raised ValueError: cannot add to {answers[0]}"
        in (ended.out)
    )
    assert ended.out.splitlines()[-2] == "4 rollouts verified again: 0 rewards changed, 2 have no reward now"
    assert len((played.parent / "new.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("name", ["rollouts.jsonl", "metrics.json", "run.json", "inputs.jsonl"])
def test_the_stored_run_is_never_overwritten(gymsdk: Command, played: Path, name: str) -> None:
    before = (played / name).read_bytes()
    ended = gymsdk("reverify", "out", "-o", f"out/../out/{name}", "--overwrite")
    assert (ended.code, (played / name).read_bytes()) == (2, before)
    assert "belongs to the stored run, which stays unchanged; choose another --output" in ended.err


@pytest.mark.parametrize("agent", ["sums", "sums_simple_agent"])
def test_agent_option_applies_to_rollouts_without_an_agent(gymsdk: Command, played: Path, agent: str) -> None:
    lines = [json.loads(line) for line in (played / "rollouts.jsonl").read_text().splitlines()]
    bare = [{key: each for key, each in line.items() if key not in {"agent_ref", "gymsdk"}} for line in lines]
    (played.parent / "bare.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in bare))
    refused = gymsdk("reverify", "bare.jsonl")
    assert (refused.code, "--agent" in refused.err) == (2, True)
    told = json.loads(gymsdk("reverify", "bare.jsonl", "--agent", agent, "--json", "-o", "new.jsonl").out)
    assert (told["rollouts"], told["changed"], told["unscored"]) == (4, [], [])
    new = [json.loads(line) for line in (played.parent / "new.jsonl").read_text().splitlines()]
    assert [(line["reward"], line["agent_ref"]["name"]) for line in new] == [(line["reward"], agent) for line in lines]


def test_running_servers_give_the_same_rewards(gymsdk: Command, played: Path, head: Callable[..., str]) -> None:
    _edited(played)
    here = json.loads(gymsdk("reverify", "out", "--json").out)
    there = json.loads(gymsdk("reverify", "out", "--json", "--head", head()).out)
    assert there == here
    assert len(there["changed"]) == 1


def test_a_run_by_servers_ends_with_the_table_of_one_in_process(gymsdk: Command, head: Callable[..., str]) -> None:
    gymsdk("tasks", "sums", "-n", 5, "--split", "train", "-o", "rows.jsonl")
    address = head("--model", "scripted/oracle:0.5")
    there = gymsdk("rollout", "--head", address, "--tasks", "rows.jsonl", "-o", "there")
    here = gymsdk("rollout", "sums", "--tasks", "rows.jsonl", "--model", "scripted/oracle:0.5", "-o", "here")
    assert there.code == 0
    shown = [[line for line in ended.out.splitlines() if "second" not in line] for ended in (there, here)]
    assert [line.replace("there", "here") for line in shown[0]] == shown[1]
    split = gymsdk("rollout", "sums", "--head", address, "--limit", 2)
    assert "2 of 2" in split.out
    again = gymsdk("rollout", "--head", address, "--tasks", "rows.jsonl", "-o", "there", "--resume")
    assert again.err == "resumed: 5 of 5 rollouts were finished before\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["rollout", "sums", "--head", "URL", "--model", "scripted/null"],
            "use the model they were started with",
        ),
        (["rollout", "sums", "--head", "URL", "--base-url", "http://x"], "leave out --base-url"),
        (["rollout", "sums", "--head", "URL", "--pin", "top_k=1"], "leave out --pin"),
        (["rollout", "sums", "--head", "URL", "--token-ids"], "leave out --token-ids"),
        (["rollout", "--head", "URL"], "name the environments to play"),
        (
            ["rollout", "--head", "URL", "--tasks", "x.jsonl", "--set", "digits=1"],
            "running servers have their settings already",
        ),
        (["rollout", "sums", "--head", "localhost:11000"], "write it as a URL"),
        (["reverify", "none"], "there is no such file"),
        (["reverify", "out", "--set", "digit=1"], "no setting 'digit'; did you mean 'digits'?"),
        (["reverify", "out", "-o", "."], "is a folder"),
    ],
)
def test_wrong_input_is_reported_in_one_sentence(gymsdk: Command, played: Path, words: list[str], told: str) -> None:
    ended = gymsdk(*(word.replace("URL", "http://127.0.0.1:9") for word in words))
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err.splitlines()[-1]


def test_missing_servers_are_reported(gymsdk: Command, played: Path) -> None:
    for words in (["reverify", "out"], ["rollout", "sums", "-o", "new"]):
        ended = gymsdk(*words, "--head", "http://127.0.0.1:9")
        assert ended.code == 1
        assert "cannot reach 127.0.0.1:9" in ended.err
    assert not (played.parent / "new").exists()
