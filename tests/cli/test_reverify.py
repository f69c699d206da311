from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.conftest import Command, StartServer


@pytest.fixture
def played(gymsdk: Command, workdir: Path) -> Path:
    """Return the folder of a run with four rollouts, some of them wrong."""
    assert gymsdk("rollout", "sums", "--limit", 2, "-k", 2, "--model", "scripted/oracle:0.5", "-o", "out").code == 0
    return workdir / "out"


def _edit_reward(folder: Path) -> None:
    """Change the reward of the first stored rollout."""
    path = folder / "rollouts.jsonl"
    first, *others = map(json.loads, path.read_text().splitlines())
    first["reward"] = 0.5
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (first, *others)))


def test_reverify_leaves_the_stored_run_unchanged(gymsdk: Command, played: Path) -> None:
    before = {path.name: path.read_bytes() for path in played.iterdir()}
    result = gymsdk("reverify", "out", "-o", "new.jsonl")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines()[0] == "4 rollouts verified again: 0 rewards changed, 0 have no reward now"
    assert {path.name: path.read_bytes() for path in played.iterdir()} == before
    new, old = ((path).read_text().splitlines() for path in (played.parent / "new.jsonl", played / "rollouts.jsonl"))
    assert list(map(json.loads, new)) == list(map(json.loads, old))


@pytest.mark.slow
def test_changed_rewards_are_listed_and_fail_only_with_the_option(gymsdk: Command, played: Path) -> None:
    _edit_reward(played)
    result = gymsdk("reverify", "out")
    assert result.code == 0
    assert result.out.splitlines()[0].startswith("sums task ")
    assert ": 0.5 is now " in result.out.splitlines()[0]
    output = json.loads(gymsdk("reverify", "out", "--json").out)
    (changed,) = output["changed"]
    assert (output["rollouts"], changed["line"], changed["old"], output["unscored"]) == (4, 1, 0.5, [])
    assert gymsdk("reverify", "out", "--fail-on-change").code == 1
    assert gymsdk("reverify", "out", "--limit", 1, "--json").out.count('"task"') == 1


@pytest.mark.slow
def test_rollouts_without_a_new_reward_are_listed_with_their_reason(gymsdk: Command, played: Path) -> None:
    answers = sorted({json.loads(line)["answer"] for line in (played / "rollouts.jsonl").read_text().splitlines()})
    result = gymsdk("reverify", "out", "--set", f"breaks=[{answers[0]}]", "-o", "new.jsonl")
    assert result.code == 1
    assert (
        f"no reward (hook_raised): hook 'verify' of environment 'sums' raised ValueError: cannot add to {answers[0]}"
        in (result.out)
    )
    assert result.out.splitlines()[-2] == "4 rollouts verified again: 0 rewards changed, 2 have no reward now"
    assert len((played.parent / "new.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
def test_the_stored_run_is_never_overwritten(gymsdk: Command, played: Path) -> None:
    for name in ("rollouts.jsonl", "metrics.json", "run.json", "inputs.jsonl"):
        before = (played / name).read_bytes()
        result = gymsdk("reverify", "out", "-o", f"out/../out/{name}", "--overwrite")
        assert (result.code, (played / name).read_bytes()) == (2, before)
        assert "belongs to the stored run, which stays unchanged; choose another --output" in result.err


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["sums", "sums_simple_agent"])
def test_agent_option_applies_to_rollouts_without_an_agent(gymsdk: Command, played: Path, agent: str) -> None:
    lines = [json.loads(line) for line in (played / "rollouts.jsonl").read_text().splitlines()]
    bare = [{key: value for key, value in line.items() if key not in {"agent_ref", "gymsdk"}} for line in lines]
    (played.parent / "bare.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in bare))
    refused = gymsdk("reverify", "bare.jsonl")
    assert (refused.code, "--agent" in refused.err) == (2, True)
    output = json.loads(gymsdk("reverify", "bare.jsonl", "--agent", agent, "--json", "-o", "new.jsonl").out)
    assert (output["rollouts"], output["changed"], output["unscored"]) == (4, [], [])
    new = [json.loads(line) for line in (played.parent / "new.jsonl").read_text().splitlines()]
    assert [(line["reward"], line["agent_ref"]["name"]) for line in new] == [(line["reward"], agent) for line in lines]


@pytest.mark.slow
def test_running_servers_give_the_same_rewards(gymsdk: Command, played: Path, start_server: StartServer) -> None:
    _edit_reward(played)
    local = json.loads(gymsdk("reverify", "out", "--json").out)
    remote = json.loads(gymsdk("reverify", "out", "--json", "--head", start_server("serve", "sums")[1]["head"]).out)
    assert remote == local
    assert len(remote["changed"]) == 1


@pytest.mark.slow
def test_a_run_by_servers_prints_the_same_table_as_one_in_process(gymsdk: Command, start_server: StartServer) -> None:
    gymsdk("tasks", "sums", "-n", 5, "--split", "train", "-o", "rows.jsonl")
    address = start_server("serve", "sums", "--model", "scripted/oracle:0.5")[1]["head"]
    remote = gymsdk("rollout", "--head", address, "--tasks", "rows.jsonl", "-o", "there")
    local = gymsdk("rollout", "sums", "--tasks", "rows.jsonl", "--model", "scripted/oracle:0.5", "-o", "here")
    assert remote.code == 0
    shown = [[line for line in result.out.splitlines() if "second" not in line] for result in (remote, local)]
    assert [line.replace("there", "here") for line in shown[0]] == shown[1]
    split = gymsdk("rollout", "sums", "--head", address, "--limit", 2)
    assert "2 of 2" in split.out
    again = gymsdk("rollout", "--head", address, "--tasks", "rows.jsonl", "-o", "there", "--resume")
    lines = ["sampling: the defaults of the servers' model", "resumed: 5 of 5 rollouts were finished before"]
    assert again.err.splitlines() == lines
