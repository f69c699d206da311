"""`gymsdk export` writes training files from runs: conversations, and pairs by reward."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from gymsdk.jsonl import read_rows

from .conftest import Command

TRAIN = """
import sys
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

model, sft, dpo, output = sys.argv[1:]
options = {"output_dir": output, "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True, "bf16": False,
           "report_to": "none", "save_strategy": "no", "max_length": None}
conversations = load_dataset("json", data_files=sft, split="train")
trainer = SFTTrainer(model, train_dataset=conversations, args=SFTConfig(**options))
text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
assert '"name": "find_contact"' in text and "<tool_call>" in text and "<tool_response>" in text, text
trainer.train()
pairs = load_dataset("json", data_files=dpo, split="train")
DPOTrainer(model, train_dataset=pairs, args=DPOConfig(**options)).train()
"""
"""A program that trains a model with both files for one step."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with right and wrong rollouts of two environments."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    play = ["rollout", "tool_call", "math", "--model", "scripted/oracle:0.5", "--split", "train", "--limit", "6"]
    command = [sys.executable, "-m", "gymsdk", *play, "--repeats", "4", "--output", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    return [row for _, row in read_rows(path)]


def read_report(gymsdk: Command, *arguments: object, code: int = 0) -> dict[str, Any]:
    done = gymsdk("export", *arguments, "--json")
    assert done.code == code, done.err
    report: dict[str, Any] = json.loads(done.out)
    return report


@pytest.mark.slow
def test_the_best_conversation_of_each_task_is_written(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    report = read_report(gymsdk, run, "--sft", tmp_path / "sft.jsonl")[str(tmp_path / "sft.jsonl")]
    rollouts, lines = read(run / "rollouts.jsonl"), read(tmp_path / "sft.jsonl")
    solved = {(played["agent_ref"]["name"], played["_ng_task_index"]) for played in rollouts if played["reward"] > 0}
    assert report["rollouts"] == len(rollouts) == 48
    assert report["written"] == len(lines) == len(solved)
    assert sum(report["left_out"].values()) == 48 - len(lines)
    assert {line["reward"] for line in lines} == {1.0}
    with_tools = [line for line in lines if json.loads(line["tools"])]
    assert 0 < len(with_tools) < len(lines)
    for line in with_tools:
        names = {tool["function"]["name"] for tool in json.loads(line["tools"])}
        called: dict[str, str] = {}
        for message in line["messages"]:
            for call in message.get("tool_calls", []):
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                called[call["id"]] = call["function"]["name"]
            if message["role"] == "tool":
                assert message["name"] == called.pop(message["tool_call_id"])
        assert not called
        assert {message.get("name") for message in line["messages"]} - {None} <= names
        assert [message["role"] for message in line["messages"][:2]] == ["system", "user"]
        assert line["messages"][-1]["role"] == "assistant"


def test_pairs_share_a_prompt_and_differ_in_reward(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    report = read_report(gymsdk, run, "--dpo", tmp_path / "dpo.jsonl")[str(tmp_path / "dpo.jsonl")]
    lines = read(tmp_path / "dpo.jsonl")
    assert report["written"] == len(lines) > 5
    for line in lines:
        assert (line["chosen_reward"], line["rejected_reward"]) == (1.0, 0.0)
        assert line["prompt"][-1]["role"] in {"user", "tool"}
        assert line["chosen"][0]["role"] == line["rejected"][0]["role"] == "assistant"
        assert line["chosen"] != line["rejected"]


def test_a_later_difference_makes_a_longer_prompt(gymsdk: Command, tmp_path: Path) -> None:
    """Two rollouts with the same first call differ in their last reply."""
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": True}]
    call = {"type": "function_call", "name": "look", "arguments": "{}", "call_id": "c1"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "a cat"}
    lines = [
        {
            "responses_create_params": {"input": "What is there?", "tools": tools},
            "response": {"output": [call, result, {"type": "message", "role": "assistant", "content": text}]},
            "reward": reward,
            "_ng_task_index": 0,
            "_ng_rollout_index": repeat,
            "gymsdk": {"environment": "e", "ended": ended},
        }
        for repeat, (text, reward, ended) in enumerate(
            [("a dog", 0.0, "done"), ("a cat", 1.0, "done"), ("a", 0.5, "tokens"), ("a cat", 1.0, "done")]
        )
    ]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = read_report(gymsdk, tmp_path, "--dpo", tmp_path / "dpo.jsonl", "--sft", tmp_path / "sft.jsonl")
    [pair] = read(tmp_path / "dpo.jsonl")
    assert [message["role"] for message in pair["prompt"]] == ["user", "assistant", "tool"]
    assert pair["chosen"] == [{"role": "assistant", "content": "a cat"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "a dog"}]
    left_out = report[str(tmp_path / "sft.jsonl")]["left_out"]
    assert left_out == {
        "truncated: a budget ended the episode": 1,
        "the reward is too low": 1,
        "the same conversation is exported already": 1,
    }
    read_report(gymsdk, tmp_path, "--sft", tmp_path / "all.jsonl", "--truncated", "--min-reward", 0.5, "--best", 4)
    assert [line["reward"] for line in read(tmp_path / "all.jsonl")] == [1.0, 0.5]


def test_an_environment_can_be_chosen_and_nothing_to_write_is_an_error(
    gymsdk: Command, run: Path, tmp_path: Path
) -> None:
    report = read_report(gymsdk, run, "--sft", tmp_path / "sft.jsonl", "--min-reward", 2, code=1)
    assert report[str(tmp_path / "sft.jsonl")]["left_out"] == {"the reward is too low": 48}
    assert read(tmp_path / "sft.jsonl") == []
    read_report(gymsdk, run, run, "--sft", tmp_path / "sft.jsonl", "--environment", "math", "--best", 9)
    lines = read(tmp_path / "sft.jsonl")
    assert lines
    assert {line["tools"] for line in lines} == {"[]"}
    assert len({json.dumps(line["messages"]) for line in lines}) == len(lines)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("there", "wandbb"), "there is no run and no service 'wandbb'; did you mean 'wandb'?"),
        (("there", "nothing"), "no service 'nothing'; the services are mlflow, otel, wandb"),
        (("nowhere", "--sft", "x"), "nowhere does not exist; name the folder of a run"),
        (("there", "nowhere", "--dpo", "x"), "nowhere does not exist; name the folder of a run"),
        (("empty", "--sft", "x"), "empty holds no run: it has no rollouts.jsonl; name a folder"),
    ],
)
def test_a_wrong_run_or_service_is_named(gymsdk: Command, workdir: Path, words: tuple[str, ...], message: str) -> None:
    for name in ("there", "empty"):
        (workdir / name).mkdir()
    (workdir / "there" / "rollouts.jsonl").touch()
    done = gymsdk("export", *words)
    assert (done.code, message in done.err, (workdir / "x").exists()) == (2, True, False), done.err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not all(map(find_spec, ("trl", "datasets", "torch"))), reason="pip install trl datasets torch")
def test_trl_trains_with_both_files(gymsdk: Command, run: Path, tmp_path: Path) -> None:
    gymsdk("export", run, "--sft", tmp_path / "sft.jsonl", "--dpo", tmp_path / "dpo.jsonl")
    build = Path(__file__).parents[1] / "tokens" / "vllm" / "build_tiny_model.py"
    subprocess.run([sys.executable, str(build), str(tmp_path / "model")], check=True, capture_output=True)
    arguments = [str(tmp_path / name) for name in ("model", "sft.jsonl", "dpo.jsonl", "output")]
    trained = subprocess.run(
        [sys.executable, "-c", TRAIN, *arguments],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert trained.returncode == 0, trained.stderr[-3000:]


@pytest.mark.parametrize("service", ["mlflow", "otel", "wandb"])
def test_a_missing_extra_is_named_before_anything_is_played(
    gymsdk: Command, run: Path, monkeypatch: pytest.MonkeyPatch, service: str
) -> None:
    package = {"otel": "opentelemetry"}.get(service, service)
    for name in list(sys.modules):
        if name.split(".")[0] == package or name.startswith("gymsdk.exporters."):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    message = f"install it: pip install 'gymsdk[{service}]'"
    for command in (["export", run, service], ["rollout", "sums", "--export", service, "--output", "new"]):
        done = gymsdk(*command)
        assert (done.code, message in done.err) == (2, True), done.err
    assert not Path("new").exists()
