from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gymsdk.rollouts.jobs import Job, build_input_row, compute_seed, get_environment_name, iter_jobs

ROW = {"responses_create_params": {"input": "2 + 2", "temperature": 0.5}, "answer": 4}


def _sent(number: int, **fields: Any) -> dict[str, Any]:
    return build_input_row({**ROW, **fields}, environment="sums", task=number, sampling={})


def test_a_row_is_sent_numbered_and_routed() -> None:
    sent = _sent(3)
    assert sent["_ng_task_index"] == 3
    assert sent["agent_ref"] == {"type": "responses_api_agents", "name": "sums_simple_agent"}
    assert get_environment_name(sent) == "sums"


def test_sampling_parameters_go_over_the_rows_own() -> None:
    sent = build_input_row(ROW, environment="sums", task=0, sampling={"temperature": 1.0, "top_p": 0.9})
    assert sent["responses_create_params"] == {"input": "2 + 2", "temperature": 1.0, "top_p": 0.9}
    assert ROW["responses_create_params"] == {"input": "2 + 2", "temperature": 0.5}


def test_stamps_of_an_earlier_run_are_replaced() -> None:
    sent = _sent(0, _ng_task_index=9, _ng_rollout_index=9, agent_ref={"name": "other"})
    assert (sent["_ng_task_index"], get_environment_name(sent)) == (0, "sums")
    assert sent["_ng_rollout_index"] == 0


def test_a_row_may_not_say_where_it_goes() -> None:
    assert [
        get_environment_name(row) for row in ({}, {"agent_ref": None}, {"agent_ref": {}}, {"agent_ref": {"name": 3}})
    ] == [None] * 4


def _repeated(*tasks: int) -> list[dict[str, Any]]:
    return [_sent(task) | {"_ng_rollout_index": repeat} for task in tasks for repeat in range(2)]


def test_each_sent_row_is_one_job_without_its_indices() -> None:
    found = list(iter_jobs(_repeated(0, 1)))
    assert [job.key for job in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert not [key for job in found for key in job.row if key.startswith("_ng_")]


def test_what_is_done_is_not_played_again() -> None:
    keys = [job.key for job in iter_jobs(_repeated(0, 1), done={(0, 1), (1, 0)})]
    assert keys == [(0, 0), (1, 1)]


def test_rows_are_taken_one_at_a_time() -> None:
    def endless() -> Iterator[dict[str, Any]]:
        while True:
            yield _sent(0)

    assert next(iter_jobs(endless())).id == "0:0"


def test_repeats_share_a_seed_and_tasks_do_not() -> None:
    one, again, other = (Job("sums", task, repeat, {}) for task, repeat in ((0, 0), (0, 1), (1, 0)))
    assert compute_seed(7, one) == compute_seed(7, again) != compute_seed(7, other)
    assert compute_seed(8, one) != compute_seed(7, one)


def test_a_seed_fits_every_generator() -> None:
    assert all(
        0 <= compute_seed(seed, Job("sums", task, 0, {})) < 2**31 for seed in (-5, 0, 2**62) for task in range(50)
    )
