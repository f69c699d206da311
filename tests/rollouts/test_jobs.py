from __future__ import annotations

from typing import Any

from gymsdk.line import compute_seed, get_environment_name
from gymsdk.rollouts.jobs import Job, build_input_row, iter_jobs

ROW = {"responses_create_params": {"input": "2 + 2", "temperature": 0.5}, "answer": 4}


def _input_row(number: int, **fields: Any) -> dict[str, Any]:
    return build_input_row({**ROW, **fields}, environment="sums", task=number, sampling={})


def test_an_input_row_is_numbered_and_names_its_agent() -> None:
    for row in (_input_row(3), _input_row(3, _ng_task_index=9, _ng_rollout_index=9, agent_ref={"name": "other"})):
        assert (row["_ng_task_index"], row["_ng_rollout_index"]) == (3, 0)
        assert row["agent_ref"] == {"type": "responses_api_agents", "name": "sums_simple_agent"}
        assert get_environment_name(row) == "sums"


def test_sampling_parameters_override_those_of_the_row() -> None:
    row = build_input_row(ROW, environment="sums", task=0, sampling={"temperature": 1.0, "top_p": 0.9})
    assert row["responses_create_params"] == {"input": "2 + 2", "temperature": 1.0, "top_p": 0.9}
    assert ROW["responses_create_params"] == {"input": "2 + 2", "temperature": 0.5}


def test_a_row_may_name_no_agent() -> None:
    assert [
        get_environment_name(row) for row in ({}, {"agent_ref": None}, {"agent_ref": {}}, {"agent_ref": {"name": 3}})
    ] == [None] * 4


def _repeated(*tasks: int) -> list[dict[str, Any]]:
    return [_input_row(task) | {"_ng_rollout_index": repeat} for task in tasks for repeat in range(2)]


def test_each_input_row_is_one_job_without_its_indices_and_finished_ones_are_skipped() -> None:
    jobs = list(iter_jobs(_repeated(0, 1)))
    assert [job.key for job in jobs] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not [key for job in jobs for key in job.row if key.startswith("_ng_")]
    assert [job.key for job in iter_jobs(_repeated(0, 1), done={(0, 1), (1, 0)})] == [(0, 0), (1, 1)]


def test_repeats_share_a_seed_and_tasks_do_not() -> None:
    one, again, other = (Job("sums", task, repeat, {}) for task, repeat in ((0, 0), (0, 1), (1, 0)))
    assert one.compute_seed(7) == again.compute_seed(7) != other.compute_seed(7)
    assert one.compute_seed(8) != one.compute_seed(7)
    assert all(0 <= compute_seed(seed, "sums", task) < 2**31 for seed in (-5, 0, 2**62) for task in range(50))
