"""The judge of NeMo Gym's maths server, as its configuration names it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from seeds.place import Place

ALWAYS = '{"text": "Both say the same. [[A=B]]"}\n'
ONE_WAY = '{"when": "Answer A:\\nthirty-two", "text": "[[A=B]]"}\n{"text": "[[A!=B]]"}\n'
"""A judge that calls the answers equal only where the expected one stands first."""

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
    """The URLs of maths servers whose configurations say different things of the judge."""
    place = Place(tmp_path_factory.mktemp("judged"))
    place.write("always.jsonl", ALWAYS)
    place.write("one_way.jsonl", ONE_WAY)
    with (
        place.serving("gymsdk policy serve script:always.jsonl --port 0") as always,
        place.serving("gymsdk policy serve script:one_way.jsonl --port 0") as one_way,
    ):
        text = MODEL.format(name="judge_model", url=always.url("policy"))
        text += MODEL.format(name="one_way_model", url=one_way.url("policy"))
        text += SERVER.format(name="asked", judge="judge_model") + "      should_use_judge: true\n"
        text += SERVER.format(name="asked_by_default", judge="judge_model")
        text += SERVER.format(name="one_way", judge="one_way_model") + "      should_use_judge: true\n"
        text += SERVER.format(name="never", judge="judge_model") + "      should_use_judge: false\n"
        place.write("judges.yaml", text)
        command = f"gymsdk serve --config judges.yaml --model scripted/null{request.param}"
        with place.serving(place.at_head(command)) as servers:
            yield {name: servers.url(name) for name in ("asked", "asked_by_default", "one_way", "never")}


def verdict(url: str) -> dict[str, object]:
    answer = httpx.post(f"{url}/verify", json=ROW, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, object] = answer.json()
    return found


@pytest.mark.parametrize(
    ("server", "reward", "orders"),
    [
        ("asked", 1.0, [("thirty-two", "two to the fifth"), ("two to the fifth", "thirty-two")]),
        ("asked_by_default", 1.0, [("thirty-two", "two to the fifth"), ("two to the fifth", "thirty-two")]),
        ("one_way", 0.0, [("thirty-two", "two to the fifth"), ("two to the fifth", "thirty-two")]),
    ],
)
def test_the_judge_is_asked_in_both_orders_and_must_agree_with_itself(
    judged: dict[str, str], server: str, reward: float, orders: list[tuple[str, str]]
) -> None:
    found = verdict(judged[server])
    assert (found["reward"], found["library_reward"]) == (reward, 0.0)
    evaluations = found["judge_evaluations"]
    assert isinstance(evaluations, list)
    requests = [each["responses_create_params"] for each in evaluations]
    shown = [each["input"][-1]["content"].partition("Answer A:\n")[2].split("\n\nAnswer B:\n") for each in requests]
    assert [tuple(each) for each in shown] == orders
    assert [each["temperature"] for each in requests] == [0.25, 0.25]
    assert all(each["response"]["output"] for each in evaluations)


def test_a_judge_that_is_switched_off_is_not_asked(judged: dict[str, str]) -> None:
    found = verdict(judged["never"])
    assert (found["reward"], found["judge_evaluations"]) == (0.0, None)


def test_a_judge_that_is_required_and_not_named_stops_the_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Place(tmp_path_factory.mktemp("unnamed"))
    place.write("a.yaml", "math: {resources_servers: {math_with_judge: {should_use_judge: true}}}\n")
    ended = place.run(place.at_head("gymsdk serve --config a.yaml --model scripted/null"))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert "should_use_judge is true, but no judge is named" in ended.err


def test_a_built_in_file_stands_in_for_no_file_that_asks_a_judge(tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Place(tmp_path_factory.mktemp("absent"))
    path = "resources_servers/math_with_judge/configs/math_stack_overflow.yaml"
    ended = place.run(place.at_head(f'gymsdk serve "+config_paths=[{path}]" --model scripted/null'))
    assert (ended.code, "may use a judge" in ended.err) == (2, True), ended.err


def test_rows_are_not_played_here_without_the_judge_that_stands_behind_a_server(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place = Place(tmp_path_factory.mktemp("rows"))
    text = SERVER.format(name="asked", judge="judge_model") + "      datasets: [{name: few, jsonl_fpath: rows.jsonl}]\n"
    place.write("a.yaml", text + MODEL.format(name="judge_model", url="http://127.0.0.1:9/v1"))
    place.write("rows.jsonl", "{}\n")
    ended = place.run("gymsdk rollout --config a.yaml --dataset few --model scripted/null --output out")
    assert (ended.code, "calls the model server 'judge_model' as its judge" in ended.err) == (2, True), ended.err
