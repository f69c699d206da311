"""The judge of NeMo Gym's maths server, as its configuration names it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from migration.workspace import Workspace

ALWAYS = '{"text": "Both say the same. [[A=B]]"}\n'
ONE_WAY = '{"when": "Answer A:\\nthirty-two", "text": "[[A=B]]"}\n{"text": "[[A!=B]]"}\n'
"""Replies of a judge that calls the answers equal only if the expected one comes first."""

MODEL = """\
{name}:
  responses_api_models:
    openai_model: {{openai_base_url: {url}, openai_api_key: none, openai_model: judge}}
"""
SERVER = """\
{name}:
  resources_servers:
    math_with_judge:
      entrypoint: app.py
      domain: math
      judge_model_server: {{type: responses_api_models, name: {judge}}}
      judge_responses_create_params: {{input: [], temperature: 0.25}}
"""
ROW = {
    "responses_create_params": {"input": [{"role": "user", "content": "How many?"}]},
    "question": "How many?",
    "expected_answer": "thirty-two",
    "response": {
        "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "two to the fifth"}]}
        ]
    },
}


@pytest.fixture(scope="module", params=["", pytest.param(" --separate", marks=pytest.mark.slow)])
def judged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yield the URLs of maths servers with different settings for the judge."""
    workspace = Workspace(tmp_path_factory.mktemp("judged"))
    workspace.write("always.jsonl", ALWAYS)
    workspace.write("one_way.jsonl", ONE_WAY)
    with (
        workspace.serve("gymsdk policy serve script:always.jsonl --port 0") as always,
        workspace.serve("gymsdk policy serve script:one_way.jsonl --port 0") as one_way,
    ):
        text = MODEL.format(name="judge_model", url=always.url("policy"))
        text += MODEL.format(name="one_way_model", url=one_way.url("policy"))
        text += SERVER.format(name="asked", judge="judge_model") + "      should_use_judge: true\n"
        text += SERVER.format(name="asked_by_default", judge="judge_model")
        text += SERVER.format(name="one_way", judge="one_way_model") + "      should_use_judge: true\n"
        text += SERVER.format(name="never", judge="judge_model") + "      should_use_judge: false\n"
        workspace.write("judges.yaml", text)
        command = f"gymsdk serve --config judges.yaml --model scripted/null{request.param}"
        with workspace.serve(workspace.with_head_port(command)) as servers:
            yield {name: servers.url(name) for name in ("asked", "asked_by_default", "one_way", "never")}


def fetch_verdict(url: str) -> dict[str, object]:
    response = httpx.post(f"{url}/verify", json=ROW, timeout=60)
    assert response.status_code == 200, response.text
    verdict: dict[str, object] = response.json()
    return verdict


@pytest.mark.parametrize(
    ("server", "reward", "orders"),
    [
        ("asked", 1.0, [("thirty-two", "two to the fifth"), ("two to the fifth", "thirty-two")]),
        ("asked_by_default", 1.0, [("thirty-two", "two to the fifth"), ("two to the fifth", "thirty-two")]),
        ("one_way", 0.0, [("thirty-two", "two to the fifth"), ("two to the fifth", "thirty-two")]),
    ],
)
def test_the_judge_compares_in_both_orders_and_must_agree_with_itself(
    judged: dict[str, str], server: str, reward: float, orders: list[tuple[str, str]]
) -> None:
    verdict = fetch_verdict(judged[server])
    assert (verdict["reward"], verdict["library_reward"]) == (reward, 0.0)
    evaluations = verdict["judge_evaluations"]
    assert isinstance(evaluations, list)
    requests = [evaluation["responses_create_params"] for evaluation in evaluations]
    compared = [
        request["input"][-1]["content"].partition("Answer A:\n")[2].split("\n\nAnswer B:\n") for request in requests
    ]
    assert [tuple(pair) for pair in compared] == orders
    assert [request["temperature"] for request in requests] == [0.25, 0.25]
    assert all(evaluation["response"]["output"] for evaluation in evaluations)


def test_a_judge_that_is_switched_off_is_not_called(judged: dict[str, str]) -> None:
    verdict = fetch_verdict(judged["never"])
    assert (verdict["reward"], verdict["judge_evaluations"]) == (0.0, None)


def test_a_required_judge_without_a_name_stops_the_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    workspace = Workspace(tmp_path_factory.mktemp("unnamed"))
    workspace.write("a.yaml", "math: {resources_servers: {math_with_judge: {should_use_judge: true}}}\n")
    result = workspace.run(workspace.with_head_port("gymsdk serve --config a.yaml --model scripted/null"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "should_use_judge is true, but no judge is named" in result.err


def test_no_built_in_file_replaces_a_missing_file_that_may_use_a_judge(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    workspace = Workspace(tmp_path_factory.mktemp("absent"))
    path = "resources_servers/math_with_judge/configs/math_stack_overflow.yaml"
    result = workspace.run(workspace.with_head_port(f'gymsdk serve "+config_paths=[{path}]" --model scripted/null'))
    assert (result.code, "may use a judge" in result.err) == (2, True), result.err


def test_a_rollout_in_this_process_is_rejected_if_the_server_calls_a_judge(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    workspace = Workspace(tmp_path_factory.mktemp("rows"))
    text = SERVER.format(name="asked", judge="judge_model") + "      datasets: [{name: few, jsonl_fpath: rows.jsonl}]\n"
    workspace.write("a.yaml", text + MODEL.format(name="judge_model", url="http://127.0.0.1:9/v1"))
    workspace.write("rows.jsonl", "{}\n")
    result = workspace.run("gymsdk rollout --config a.yaml --dataset few --model scripted/null --output out")
    assert (result.code, "calls the model server 'judge_model' as its judge" in result.err) == (2, True), result.err
