"""The GRPO example learns through gymsdk's servers; its controls do not, and a missing weight update is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

VLLM_PYTHON = os.environ.get("GYMSDK_VLLM_PYTHON")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("torch") is None, reason="pip install torch"),
]
NEEDS_TRANSFORMERS = pytest.mark.skipif(find_spec("transformers") is None, reason="pip install transformers")
NEEDS_VLLM = pytest.mark.skipif(
    VLLM_PYTHON is None or find_spec("transformers") is None, reason="no vLLM; see tests/tokens/vllm/run"
)

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "grpo"


def install(folder: Path, name: str, source: str) -> None:
    metadata = folder / f"gym_env_{name}-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: gym-env-{name}\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[gymsdk.environments]\n{name} = gym_env_{name}\n")
    (folder / f"gym_env_{name}.py").write_text(source)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """Install the environment of the example for the processes of a test; return their variables."""
    install(tmp_path / "packages", "digits", (EXAMPLE / "environment" / "gym_env_digits.py").read_text())
    return os.environ | {"PYTHONPATH": str(tmp_path / "packages"), "PYTHONHASHSEED": "0"}


def train(settings: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / "train.py"), *options]
    return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=800, check=False)


def read_curve(settings: dict[str, str], folder: Path, *options: str) -> list[dict[str, Any]]:
    trained = train(settings, "--output", str(folder / "curve.jsonl"), *options)
    assert trained.returncode == 0, trained.stderr
    return [json.loads(line) for line in (folder / "curve.jsonl").read_text().splitlines()]


def compute_mean(curve: list[dict[str, Any]]) -> float:
    return sum(line["reward"] for line in curve) / len(curve)


@pytest.mark.slow
def test_the_policy_learns(settings: dict[str, str], tmp_path: Path) -> None:
    curve = read_curve(settings, tmp_path, "--steps", "80")
    assert len(curve) == 80
    assert compute_mean(curve[-10:]) - compute_mean(curve[:10]) >= 0.4
    assert max(line["gap"] for line in curve) < 1e-4


@pytest.mark.slow
def test_a_policy_that_does_not_learn_stays_where_it_is(settings: dict[str, str], tmp_path: Path) -> None:
    curve = read_curve(settings, tmp_path, "--steps", "20", "--frozen")
    assert compute_mean(curve) < 0.15
    assert max(line["gap"] for line in curve) < 1e-4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digitz"], "no environment named 'digitz'; did you mean 'digits'?"),
        (["math", "famlies=sets"], "environment 'math' has no setting 'famlies'; did you mean 'families'?"),
        (["tool_call", "kinds=[1"], "the value of 'kinds=[1' is not valid JSON"),
    ],
)
@pytest.mark.slow
def test_wrong_environments_and_settings_are_explained_in_one_line(
    words: list[str], message: str, settings: dict[str, str]
) -> None:
    trained = train(settings, "--environment", *words)
    assert trained.returncode == 2
    assert trained.stderr.startswith(f"train.py: error: {message}")
    assert trained.stderr.count("\n") == 1


UNSOLVED = """
from typing import Literal

from gymsdk import Message, Reset, Step, Task, Transcript, Verdict, hookimpl


async def count(word: str) -> int:
    \"\"\"Count the letters of a word.\"\"\"
    return len(word)


@hookimpl
def tools():
    return [count]


@hookimpl
def tasks(split: Literal["training"]):
    for word in ("one", "three"):
        yield Task.ask(f"How many letters has {word}? Zürich")


@hookimpl
def verify(transcript: Transcript) -> Verdict:
    return Verdict(reward=float("3" in transcript.reply))
"""


@pytest.mark.slow
@NEEDS_TRANSFORMERS
def test_an_environment_without_a_solution_and_with_few_tasks_is_played(
    settings: dict[str, str], tmp_path: Path
) -> None:
    install(tmp_path / "packages", "letters", UNSOLVED)
    curve = read_curve(settings, tmp_path, "--steps", "2", "--environment", "letters")
    assert max(line["gap"] for line in curve) < 1e-4


@pytest.mark.slow
@NEEDS_TRANSFORMERS
@pytest.mark.parametrize(
    "words",
    [
        ["math", "families=fractions", "max_difficulty=1"],
        ["multineedle", "distractors=10", "needles=1", "spread=0"],
        ["tool_call"],
    ],
)
def test_other_environments_are_played_with_exact_tokens(
    words: list[str], settings: dict[str, str], tmp_path: Path
) -> None:
    curve = read_curve(settings, tmp_path, "--steps", "2", "--environment", *words)
    assert len(curve) == 2
    assert max(line["gap"] for line in curve) < 1e-4
    if words[0] == "tool_call":
        assert compute_mean(curve) > 0.0, "the warm-up has taught the form of the calls"


@pytest.mark.slow
def test_a_run_can_be_repeated(settings: dict[str, str], tmp_path: Path) -> None:
    first, second = (read_curve(settings, tmp_path, "--steps", "4") for _ in range(2))
    assert [line["reward"] for line in first] == [line["reward"] for line in second]


@pytest.mark.vllm
@NEEDS_VLLM
@pytest.mark.parametrize("environment", ["digits", "tool_call"])
def test_the_policy_learns_with_vllm(environment: str, settings: dict[str, str], tmp_path: Path) -> None:
    options = ("--vllm-python", str(VLLM_PYTHON), "--environment", environment)
    curve = read_curve(settings, tmp_path, "--steps", "60", *options)
    assert compute_mean(curve[-10:]) - compute_mean(curve[:10]) >= 0.4
    assert max(line["gap"] for line in curve) < 1e-4


@pytest.mark.vllm
@NEEDS_VLLM
def test_a_policy_with_tools_that_does_not_learn_stays_where_it_is(settings: dict[str, str], tmp_path: Path) -> None:
    options = ("--vllm-python", str(VLLM_PYTHON), "--environment", "tool_call")
    curve = read_curve(settings, tmp_path, "--steps", "10", "--frozen", *options)
    assert 0.0 < compute_mean(curve) < 0.15


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("--vllm-python", str(VLLM_PYTHON)), marks=(pytest.mark.vllm, NEEDS_VLLM)),
    ],
)
def test_missing_weight_updates_are_noticed(options: tuple[str, ...], settings: dict[str, str]) -> None:
    trained = train(settings, "--steps", "3", "--without-sync", *options)
    assert trained.returncode == 1
    assert "the generation server has other weights" in trained.stderr
