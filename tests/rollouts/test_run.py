from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sums_environment import PLAIN

from gymsdk.errors import BadOutput, BadRow, GymsdkError, UsageError
from gymsdk.rollouts.folder import FILES
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.run import DEFAULT_TASKS, Run, execute
from gymsdk.rollouts.settings import RunLimits
from rollouts.conftest import RecordingProgress, read_comparable, read_lines

TASK = '{"responses_create_params": {"input": "2 + 2"}, "answer": 4}\n'
"""One row of a tasks file."""


@pytest.fixture(autouse=True)
def _sums(installed: Callable[..., Path]) -> None:
    installed()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def _run(
    out: Path, *, resume: bool = False, overwrite: bool = False, attempts: int = 1, **plan: Any
) -> RecordingProgress:
    given = {"environments": {"sums": {}}, "model": "scripted/oracle", "limit": 3, **plan}
    progress = RecordingProgress()
    run = Run(Plan(**given), out, resume=resume, overwrite=overwrite, limits=RunLimits(attempts=attempts))
    asyncio.run(execute(run, progress))
    return progress


def test_a_run_writes_its_five_files_with_every_rollout_and_its_sampling(out: Path) -> None:
    progress = _run(out, repeats=2, sampling={"temperature": 0.5, "stop": ["x"]})
    assert {path.name for path in out.iterdir()} == set(FILES)
    assert (progress.total, len(progress.played)) == (6, 6)
    keys = [(line["_ng_task_index"], line["_ng_rollout_index"]) for line in read_lines(out / "inputs.jsonl")]
    assert keys == [(task, repeat) for task in range(3) for repeat in range(2)]
    assert set(keys) == read_comparable(out / "rollouts.jsonl").keys()
    for name in ("inputs.jsonl", "rollouts.jsonl"):
        params = read_lines(out / name)[0]["responses_create_params"]
        assert (params["temperature"], params["stop"]) == (0.5, ["x"])


def test_an_output_row_has_the_fields_of_the_row_and_the_verdict(out: Path, tmp_path: Path) -> None:
    row = {"responses_create_params": {"input": "2 + 2"}, "answer": 4, "mine": {"a": [1]}, "reward": 9, "response": 9}
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row))
    _run(out, tasks=tmp_path / "tasks.jsonl")
    (line,) = read_lines(out / "rollouts.jsonl")
    assert {key: line[key] for key in ("answer", "mine", "reward", "extracted_answer", "right")} == {
        "answer": 4,
        "mine": {"a": [1]},
        "reward": 1.0,
        "extracted_answer": "4",
        "right": True,
    }
    assert line["agent_ref"] == {"type": "responses_api_agents", "name": "sums_simple_agent"}
    assert (line["_ng_task_index"], line["_ng_rollout_index"]) == (0, 0)
    assert line["responses_create_params"]["input"] == [{"role": "user", "content": "2 + 2"}]
    assert line["response"]["output"][0]["content"][0]["text"] == "4"


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "retried"), [("breaks", 1), ("sulks", 0)])
def test_a_failing_row_does_not_stop_the_run_and_is_played_again_unless_it_is_terminal(
    out: Path, fault: str, retried: int
) -> None:
    _run(out)
    answer = read_lines(out / "inputs.jsonl")[0]["answer"]
    failing = {"environments": {"sums": {fault: [answer]}}}
    _run(out, overwrite=True, **failing)
    assert len(read_comparable(out / "rollouts.jsonl")) == 2
    assert len(_run(out, resume=True, **failing).played) == retried
    assert len(read_lines(out / "failures.jsonl")) == 1


HUGE = f"""{PLAIN}
class Pays(Task):
    pays: float

@hookimpl
def tasks(split: Literal["train"]):
    yield from (Pays.ask("go", pays=pays) for pays in (1.5e308, 0.0, 0.0))

@hookimpl
def step(task: Pays):
    return Step(reward=task.pays, done=True)

@hookimpl
def verify():
    return Verdict(reward=1.5e308)
"""
"""Source of an environment that gives its first task a reward larger than a float can hold."""


def test_a_reward_sum_that_is_not_finite_is_a_failure_and_the_run_has_metrics(
    out: Path, installed: Callable[..., Path]
) -> None:
    installed("huge", HUGE)
    huge = {"environments": {"huge": {}}, "model": "scripted/echo"}
    for resume in (False, True):
        _run(out, resume=resume, **huge)
        assert [line["reward"] for line in read_lines(out / "rollouts.jsonl")] == [1.5e308] * 2
        (failure,) = read_lines(out / "failures.jsonl")
        assert (failure["_ng_failure_class"], failure["_ng_failure_stage"]) == ("not_finite", "verify")
        (figures,) = json.loads((out / "metrics.json").read_text())
        assert figures["agent_metrics"]["mean/reward"] == 1.5e308


def test_a_resume_without_a_run_starts_one_and_that_of_a_finished_run_plays_nothing(out: Path) -> None:
    assert len((_run(out, resume=True)).played) == 3
    before = (out / "rollouts.jsonl").read_bytes()
    progress = _run(out, resume=True)
    assert (progress.played, progress.progress.scored) == ([], 3)
    assert (out / "rollouts.jsonl").read_bytes() == before


def test_an_existing_run_is_not_overwritten(out: Path) -> None:
    _run(out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(BadOutput, match="out holds a run; continue it with --resume, or replace it with --overwrite"):
        _run(out)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_foreign_files_are_not_overwritten(out: Path) -> None:
    out.mkdir()
    (out / "rollouts.jsonl").write_text("mine\n")
    for resume in (False, True):
        with pytest.raises(BadOutput, match=r"holds rollouts\.jsonl, but no run; use --overwrite"):
            _run(out, resume=resume)
    assert (out / "rollouts.jsonl").read_text() == "mine\n"
    assert len((_run(out, overwrite=True)).played) == 3


def test_changed_settings_are_rejected_on_resume_and_named(out: Path) -> None:
    _run(out)
    differences = r"\n  --repeats was 1, now 2\n  --model was .*oracle, now .*null\nresume it unchanged"
    with pytest.raises(BadOutput, match=differences):
        _run(out, resume=True, model="scripted/null", repeats=2)


def test_missing_inputs_are_reported_on_resume(out: Path) -> None:
    _run(out)
    (out / "inputs.jsonl").unlink()
    with pytest.raises(BadOutput, match=r"inputs\.jsonl is missing"):
        _run(out, resume=True)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [([7, 3], [7, 3]), ([7, None], [0, 1]), ([7, 7], [0, 1]), ([None, 7], [0, 1]), ([True, 3], [0, 1])],
)
def test_rows_keep_their_task_numbers_if_all_are_valid_and_distinct(
    out: Path, tmp_path: Path, given: list[int | None], numbers: list[int]
) -> None:
    rows = [json.loads(TASK) | ({} if number is None else {"_ng_task_index": number}) for number in given]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    _run(out, tasks=tmp_path / "tasks.jsonl", limit=None)
    assert [line["_ng_task_index"] for line in read_lines(out / "inputs.jsonl")] == numbers
    assert read_comparable(out / "rollouts.jsonl").keys() == {(number, 0) for number in numbers}


def test_rollouts_have_trajectories_when_requested(out: Path) -> None:
    run = Run(Plan(environments={"sums": {}}, model="scripted/oracle", limit=1, repeats=2), out, trajectories=True)
    asyncio.run(execute(run, RecordingProgress()))
    for line in read_lines(out / "rollouts.jsonl"):
        trajectory = line["ng_trajectory"]
        assert trajectory["rollout_id"] == f"0-{line['_ng_rollout_index']}"
        (turn,) = trajectory["turns"]
        (call,) = trajectory["model_calls"]
        assert turn["question"] == trajectory["invocations"][0]["conversation"][: len(turn["question"])]
        assert turn["answer"] == line["response"]["output"]
        assert turn["model_calls"] == [{"model_call_id": call["model_call_id"]}]
        assert call["completed_at"] >= call["started_at"] > 0


@pytest.mark.parametrize("by_task", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_inputs_of_a_run_played_in_parts_give_the_same_rollouts(
    out: Path, tmp_path: Path, *, by_task: bool
) -> None:
    _run(out, model="scripted/oracle:0.5", repeats=3)
    lines = read_lines(out / "inputs.jsonl")
    if by_task:
        lines = [line for line in lines if line.pop("_ng_rollout_index") == 0]
    rollouts = {}
    for number, part in enumerate((lines[:2], lines[2:])):
        tasks = tmp_path / f"{number}.jsonl"
        tasks.write_text("\n".join(map(json.dumps, part)))
        folder = tmp_path / str(number)
        _run(folder, model="scripted/oracle:0.5", limit=None, tasks=tasks, repeats=3 if by_task else 1)
        rollouts |= read_comparable(folder / "rollouts.jsonl")
    assert rollouts == read_comparable(out / "rollouts.jsonl")


def test_repeats_of_numbered_repeats_get_consecutive_numbers(out: Path, tmp_path: Path) -> None:
    _run(tmp_path / "first", repeats=2, limit=1)
    _run(out, tasks=tmp_path / "first" / "inputs.jsonl", repeats=2, limit=None)
    assert read_comparable(out / "rollouts.jsonl").keys() == {(0, repeat) for repeat in range(4)}


def test_a_run_with_one_input_row_per_task_can_be_resumed(out: Path) -> None:
    _run(out, repeats=2)
    before = read_comparable(out / "rollouts.jsonl")
    tasks = [line for line in read_lines(out / "inputs.jsonl") if line.pop("_ng_rollout_index") == 0]
    (out / "inputs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in tasks))
    kept = (out / "rollouts.jsonl").read_bytes().splitlines(keepends=True)[:2]
    (out / "rollouts.jsonl").write_bytes(b"".join(kept))
    progress = _run(out, repeats=2, resume=True)
    assert (progress.total, len(progress.played)) == (6, 4)
    assert read_comparable(out / "rollouts.jsonl") == before
    assert len(read_lines(out / "inputs.jsonl")) == 6


def test_rollouts_used_as_tasks_keep_nothing_of_their_verdict(out: Path, tmp_path: Path) -> None:
    _run(tmp_path / "first")
    _run(out, tasks=tmp_path / "first" / "rollouts.jsonl", environments={"sums": {"breaks": list(range(2000))}})
    failures, stale = read_lines(out / "failures.jsonl"), {"right", "extracted_answer", "reward", "grader_timeout"}
    assert len(failures) == 3
    assert all(not stale & line.keys() for line in failures)
    assert all(not (stale | {"gymsdk", "response"}) & line.keys() for line in read_lines(out / "inputs.jsonl"))


@pytest.mark.parametrize(
    "plan",
    [
        {"split": "trian"},
        {"environments": {"sums": {"digit": "3"}}},
        {"environments": {"summs": {}}},
        {"model": "scripted/orcale"},
        {"model": "vllm/x"},
        {"tasks": Path("missing.jsonl")},
    ],
)
def test_invalid_input_creates_no_files(out: Path, plan: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GYMSDK_BASE_URL", raising=False)
    with pytest.raises(UsageError) as caught:
        _run(out / "deep", **plan)
    assert "\n" not in str(caught.value)
    assert not out.exists()


@pytest.mark.slow
def test_a_bad_row_leaves_an_existing_run_unchanged(out: Path, tmp_path: Path) -> None:
    _run(out)
    before = {path: path.read_bytes() for path in out.iterdir()}
    (tmp_path / "tasks.jsonl").write_text("{broken")
    with pytest.raises(BadRow, match=r"tasks\.jsonl:1: .* skip such rows with --skip-bad-rows"):
        _run(out, overwrite=True, tasks=tmp_path / "tasks.jsonl")
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_bad_rows_can_be_skipped_and_are_reported(out: Path, tmp_path: Path) -> None:
    good = '{"responses_create_params": {"input": "2 + 2"}, "answer": 4}'
    (tmp_path / "tasks.jsonl").write_text(f"{good}\n{{broken\n{good}\n")
    progress = _run(out, tasks=tmp_path / "tasks.jsonl", skip_bad_rows=True)
    assert len(progress.played) == 2
    assert [":2: not valid JSON" in message for message in progress.messages] == [True]


@pytest.mark.parametrize("text", ["", "\n\n", "{broken\n"])
def test_a_tasks_file_without_rows_is_rejected(out: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "tasks.jsonl").write_text(text)
    with pytest.raises(BadRow, match="has no rows to play"):
        _run(out, tasks=tmp_path / "tasks.jsonl", skip_bad_rows=True)
    assert not out.exists()


@pytest.mark.slow
def test_an_endless_split_is_limited_with_a_message(out: Path) -> None:
    progress = _run(out, limit=None)
    assert len(progress.played) == DEFAULT_TASKS
    assert progress.messages == [f"playing the first {DEFAULT_TASKS} tasks; choose another number with --limit N"]


def test_an_error_of_the_metrics_hook_is_reported_beside_the_other_metrics(
    out: Path, installed: Callable[..., Path]
) -> None:
    installed("odd", f'{PLAIN}\n@hookimpl\ndef metrics(rollouts):\n    raise ZeroDivisionError("none")\n')
    _run(out, environments={"odd": {}})
    (summary,) = json.loads((out / "metrics.json").read_bytes())
    assert "ZeroDivisionError" in summary["complaint"]
    assert summary["agent_metrics"]["mean/reward"] == 1.0


def test_a_failing_lifespan_is_reported_and_the_run_can_be_resumed(out: Path, installed: Callable[..., Path]) -> None:
    index = """
@hookimpl
@contextlib.asynccontextmanager
async def lifespan():
    yield Path(__file__).with_name("index").read_text()

@hookimpl
def verify(shared):
    return Verdict(reward=float(shared))
"""
    site = installed("living", PLAIN + index)
    with pytest.raises(GymsdkError, match="living"):
        _run(out, environments={"living": {}}, limit=1)
    (site / "index").write_text("0.5")
    _run(out, environments={"living": {}}, limit=1, resume=True)
    assert [line["reward"] for line in read_lines(out / "rollouts.jsonl")] == [0.5]
