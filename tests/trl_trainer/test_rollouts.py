"""`rollout_func` plays the episodes of a real `GRPOTrainer` on the CPU, in its process and through servers."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.timeout(300),
    # Those of TRL and transformers, about their own code and about experimental functions.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(find_spec("trl") is None, reason="pip install gymsdk[trl]"),
]

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "trl"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the environment of the examples in a folder of the test, and make the model's module importable."""
    folder = tmp_path / "packages"
    metadata = folder / "gym_env_digits-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gym-env-digits\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[gymsdk.environments]\ndigits = gym_env_digits\n")
    (folder / "gym_env_digits.py").symlink_to(ROOT / "examples/grpo/environment/gym_env_digits.py")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return folder


def build_trainer(rollouts: Any, folder: Path, *, vocabulary: int | None = None, **changes: Any) -> Any:
    """Return a trainer of a small random model, with groups of four."""
    from tiny_model import build_model, build_tokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = build_model(0)
    if vocabulary is not None:
        model.resize_token_embeddings(vocabulary)
    settings = {
        "output_dir": str(folder / "trained"),
        "max_steps": 2,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 3,
        "learning_rate": 1e-3,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        **changes,
    }
    return GRPOTrainer(
        model=model,
        processing_class=build_tokenizer(),
        train_dataset=rollouts.dataset,
        rollout_func=rollouts,
        reward_funcs=rollouts.reward,
        args=GRPOConfig(**settings),
    )


def get_prompts(rollouts: Any, *numbers: int) -> list[Any]:
    return [rollouts.dataset[number]["prompt"] for number in numbers]


def test_a_trainer_learns_from_whole_episodes(packages: Path, tmp_path: Path) -> None:
    from gymsdk.trl import rollout_func

    rollouts = rollout_func("digits", limit=20)
    trainer = build_trainer(rollouts, tmp_path)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["failed_rollouts"] for entry in entries] == [0.0, 0.0]
    assert all(0.0 <= entry["reward"] <= 1.0 for entry in entries)
    assert any((old != new).any() for old, new in zip(before, trainer.model.parameters(), strict=True))


def test_the_tokens_are_those_of_the_episode(packages: Path, tmp_path: Path) -> None:
    from gymsdk.trl import rollout_func

    rollouts = rollout_func("digits", limit=20)
    trainer = build_trainer(rollouts, tmp_path)
    tokenizer = trainer.processing_class
    result = rollouts(get_prompts(rollouts, 3, 3, 7, 7), trainer)
    assert result["logprobs"] is None, "TRL computes them with its own model"
    for number, prompt, completion, mask, reward in zip(
        (3, 3, 7, 7),
        result["prompt_ids"],
        result["completion_ids"],
        result["env_mask"],
        result["gymsdk_reward"],
        strict=True,
    ):
        row = rollouts.rows[number]
        assert tokenizer.decode(prompt) == f"<user>{row['first']}<end><assistant>"
        assert len(mask) == len(completion)
        between = tokenizer.decode([token for token, own in zip(completion, mask, strict=True) if not own])
        assert between.removeprefix("<end>") == f"<user>{row['second']}<end><assistant>"
        assert mask[0] == mask[-1] == 1
        turns = tokenizer.decode(completion).split(f"<user>{row['second']}<end><assistant>")
        right = [turn[:1] == row[key] for turn, key in zip(turns, ("first", "second"), strict=True)]
        assert reward == sum(right) / 2


FAILING = """
from typing import Literal

from gymsdk import Task, Verdict, hookimpl


class Sum(Task):
    fails: bool


@hookimpl
def tasks(split: Literal["train"]):
    for fails in (False, True):
        yield Sum.ask("1+1", fails=fails)


@hookimpl
def verify(task: Sum):
    if task.fails:
        raise RuntimeError("the grader is broken")
    return Verdict(reward=1.0)
"""


def test_failed_episodes_are_masked_and_have_no_reward(
    packages: Path, tmp_path: Path, environment: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from gymsdk.errors import GymsdkError
    from gymsdk.trl import rollout_func

    rollouts = rollout_func(environment(FAILING))
    trainer = build_trainer(rollouts, tmp_path)
    result = rollouts(get_prompts(rollouts, 0, 0, 1, 1), trainer)
    assert result["gymsdk_reward"] == [1.0, 1.0, None, None]
    assert [any(mask) for mask in result["env_mask"]] == [True, True, False, False]
    assert "2 of 4 episodes failed and are masked" in caplog.text
    assert "the grader is broken" in caplog.text
    logged: dict[str, float] = {}
    assert rollouts.reward(**result, log_metric=logged.__setitem__) == [1.0, 1.0, None, None]
    assert logged["failed_rollouts"] == 0.5
    with pytest.raises(GymsdkError, match=r"all 2 episodes failed.*the grader is broken"):
        rollouts(get_prompts(rollouts, 1, 1), trainer)
    trainer.train()
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())


def test_a_token_limit_that_ends_nearly_all_episodes_is_reported_once(
    packages: Path, tmp_path: Path, environment: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from gymsdk.trl import rollout_func

    rollouts = rollout_func(environment(FAILING.replace("task.fails", "False")))
    trainer = build_trainer(rollouts, tmp_path, max_completion_length=3)
    prompts = get_prompts(rollouts, *[0] * 10, *[1] * 10)

    def play(*, ends: int) -> int:
        """Play a batch of which *ends* replies end by themselves; return the number of new warnings."""
        replies = [[7, 8, 1] if number < ends else [7, 8, 9] for number in range(20)]
        trainer._generate_single_turn = lambda *_: (replies, None)
        caplog.clear()
        rollouts(prompts, trainer)
        return caplog.text.count("token limit")

    assert play(ends=3) == 0
    assert play(ends=2) == 1
    assert play(ends=2) == 0, "the batch before had the warning"
    assert play(ends=10) == 0
    assert play(ends=0) == 1
    assert (
        "20 of 20 episodes ended because a reply reached its token limit (3 tokens; the mean length of a reply is 3);"
        " raise the limit with max_completion_length of GRPOConfig"
    ) in caplog.text


ENDLESS = """
from typing import Literal

from gymsdk import Step, Task, Verdict, hookimpl


@hookimpl
def tasks(split: Literal["train"]):
    yield Task.ask("count")


@hookimpl
def step():
    return Step(messages=["go on"])


@hookimpl
def verify():
    return Verdict(reward=0.5)
"""


@pytest.mark.parametrize(("limit", "length"), [(None, 64), (32, 32)])
def test_an_episode_ends_before_it_exceeds_the_context(
    packages: Path, tmp_path: Path, environment: Any, limit: int | None, length: int
) -> None:
    from gymsdk.trl import rollout_func

    rollouts = rollout_func(environment(ENDLESS), tokens=limit)
    trainer = build_trainer(rollouts, tmp_path)
    result = rollouts(get_prompts(rollouts, 0, 0), trainer)
    assert result["gymsdk_reward"] == [0.5, 0.5]
    for prompt, completion, mask in zip(
        result["prompt_ids"], result["completion_ids"], result["env_mask"], strict=True
    ):
        assert length - 20 < len(prompt) + len(completion) <= length
        assert mask.count(0) > 5
        assert mask[-1] == 1


def test_prompts_that_trl_has_not_repeated_are_refused(packages: Path, tmp_path: Path) -> None:
    from gymsdk.errors import UsageError
    from gymsdk.trl import rollout_func

    rollouts = rollout_func("digits", limit=20)
    trainer = build_trainer(rollouts, tmp_path)
    with pytest.raises(UsageError, match="did not repeat"):
        rollouts(get_prompts(rollouts, 0, 1, 2), trainer)
    with pytest.raises(UsageError, match="names no task"):
        rollouts([[{"role": "user", "content": "hi"}]] * 2, trainer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name the environment"),
        ({"environment": "tool_call", "agent": "other"}, "head=URL"),
        ({"environment": "tool_call", "split": "train", "tasks": []}, "not both"),
        ({"environment": "tool_call", "tasks": []}, "no task"),
        ({"head": "http://127.0.0.1:9", "tasks": [{"responses_create_params": {"input": "hi"}}]}, "names no agent"),
    ],
)
def test_wrong_arguments_are_explained(arguments: dict[str, Any], message: str) -> None:
    from gymsdk.errors import UsageError
    from gymsdk.trl import rollout_func

    with pytest.raises(UsageError, match=message):
        rollout_func(**arguments)


@pytest.fixture
def head() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Yield the head of servers with an engine that knows the answers of `tool_call`, and the engine's process."""
    command = [sys.executable, "-m", "gymsdk"]
    with ExitStack() as stack:
        policy = [*command, "policy", "serve", "oracle", "--env", "tool_call", "--pairs", "--port", "0", "--json"]
        engine = stack.enter_context(subprocess.Popen(policy, stdout=subprocess.PIPE, text=True))
        stack.callback(engine.kill)
        assert engine.stdout is not None
        url = json.loads(engine.stdout.readline())["url"]
        served = [*command, "serve", "tool_call", "--model", "vllm/policy", "--base-url", url, "--token-ids"]
        servers = stack.enter_context(
            subprocess.Popen([*served, "--port", "0", "--json"], stdout=subprocess.PIPE, text=True)
        )
        stack.callback(servers.terminate)
        assert servers.stdout is not None
        yield json.loads(servers.stdout.readline())["head"], engine


def test_servers_play_the_episodes(
    packages: Path, tmp_path: Path, head: tuple[str, subprocess.Popen[str]], caplog: pytest.LogCaptureFixture
) -> None:
    from gymsdk.errors import GymsdkError
    from gymsdk.trl import rollout_func

    updates: list[int] = []
    rollouts = rollout_func(
        "tool_call", head=head[0], limit=8, update_weights=lambda trainer: updates.append(trainer.state.global_step)
    )
    trainer = build_trainer(rollouts, tmp_path, max_completion_length=600)
    result = rollouts(get_prompts(rollouts, *range(4), *range(4)), trainer)
    assert result["gymsdk_reward"] == [1.0] * 8
    assert updates == [0]
    masks = result["env_mask"]
    assert any(0 in mask for mask in masks), "at least one episode has several turns"
    for completion, mask, logprobs in zip(result["completion_ids"], masks, result["logprobs"], strict=True):
        assert len(completion) == len(mask) == len(logprobs)
        assert mask[0] == mask[-1] == 1
        assert all(logprob == 0.0 for logprob, own in zip(logprobs, mask, strict=True) if not own)
    assert trainer.reward_funcs[0](**result, log_metric=None) == [1.0] * 8
    os.kill(head[1].pid, signal.SIGKILL)
    with caplog.at_level(logging.ERROR), pytest.raises(GymsdkError, match="all 2 episodes failed"):
        rollouts(get_prompts(rollouts, 0, 0), trainer)


@pytest.mark.slow
@pytest.mark.timeout(3700)
def test_the_example_learns_and_its_control_does_not(packages: Path, tmp_path: Path) -> None:
    means = {}
    for name, options in (("learning", ["--steps", "150"]), ("frozen", ["--steps", "30", "--frozen"])):
        curve = tmp_path / f"{name}.jsonl"
        command = [sys.executable, str(EXAMPLE / "train.py"), *options, "--output", str(curve)]
        trained = subprocess.run(
            command,
            env=os.environ | {"PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert trained.returncode == 0, trained.stderr
        rewards = [json.loads(line)["reward"] for line in curve.read_text().splitlines()]
        means[name] = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert means["learning"][1] - means["learning"][0] >= 0.4
    assert means["frozen"][1] < 0.15
