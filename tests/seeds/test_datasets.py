"""Datasets of a configuration, rolled out by their names."""

from __future__ import annotations

import json

import pytest

from seeds.page import file
from seeds.place import Place, rows


@pytest.fixture
def sums(place: Place) -> Place:
    """A place with the page's configuration and the rows it lists."""
    place.write("sums.yaml", file("sums.yaml"))
    rows(place, "tool_call", 2)
    return place


def rewards(place: Place, folder: str) -> list[float]:
    return [json.loads(line)["reward"] for line in (place.folder / folder / "rollouts.jsonl").read_text().splitlines()]


def test_a_dataset_is_played_as_often_as_it_says_by_whom_the_configuration_names(sums: Place) -> None:
    ended = sums.run("gymsdk rollout --config sums.yaml --dataset small --output out")
    assert (ended.code, rewards(sums, "out")) == (0, [1.0] * 4), ended.err
    about = json.loads((sums.folder / "out" / "run.json").read_text())
    assert about["settings"]["model"] == "scripted/oracle"


def test_another_model_and_count_can_be_named(sums: Place) -> None:
    ended = sums.run("gymsdk rollout --config sums.yaml --dataset small --model scripted/null --repeats 1 --output out")
    assert (ended.code, len(rewards(sums, "out"))) == (0, 2), ended.err


def test_the_model_of_the_configuration_is_asked_with_its_own_address_and_key(sums: Place) -> None:
    sums.write(
        "other.yaml",
        "policy_model: {_delete_key: true, responses_api_models: {vllm_model: {base_url: "
        f"'{sums.engine}', api_key: hush-hush, model: policy}}}}}}\n",
    )
    words = "--config sums.yaml --config other.yaml --dataset small"
    ended = sums.run(f"gymsdk rollout {words} --output out")
    assert (ended.code, rewards(sums, "out")) == (0, [1.0] * 4), ended.err
    said = (sums.folder / "out" / "run.json").read_text()
    assert (json.loads(said)["base_url"], "hush" in said) == (sums.engine, False)


def test_servers_play_a_dataset_with_the_agent_it_stands_at(sums: Place) -> None:
    with sums.serving(sums.at_head("gymsdk serve --config sums.yaml")):
        ended = sums.run(f"gymsdk rollout --config sums.yaml --dataset small --head {sums.head} --output out")
    assert (ended.code, rewards(sums, "out")) == (0, [1.0] * 4), ended.err
    [figures] = json.loads((sums.folder / "out" / "metrics.json").read_text())
    assert figures["agent_ref"]["name"] == "assistant_agent"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--dataset smal",
            "--dataset smal: sums.yaml does not define this dataset; did you mean 'small'? Its datasets are small",
        ),
        ("", "--config requires the name of one of its datasets; pass it with --dataset"),
        ("--dataset small tool_call", "leave out NAME"),
        ("--dataset small --tasks rows.jsonl", "leave out --tasks"),
        ("--dataset small --agent assistant_agent", "leave out --agent"),
        (
            "--dataset small --pin temperature=1",
            "the configuration defines the model; change it there, or pass --model too",
        ),
    ],
)
def test_what_does_not_fit_is_said_in_a_sentence(sums: Place, words: str, said: str) -> None:
    ended = sums.run(f"gymsdk rollout --config sums.yaml {words} --output out")
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert said in ended.err
    assert not (sums.folder / "out").exists()


def test_a_file_that_is_missing_is_named_with_the_line_that_names_it(sums: Place) -> None:
    (sums.folder / "rows.jsonl").unlink()
    ended = sums.run("gymsdk rollout --config sums.yaml --dataset small --output out")
    assert (
        ended.code,
        ended.err.startswith("Error: sums.yaml:10: the file rows.jsonl of dataset 'small' does not exist"),
    ) == (
        2,
        True,
    )


def test_the_rows_of_a_dataset_are_checked_without_being_played(sums: Place) -> None:
    good = sums.run("gymsdk tasks --config sums.yaml --dataset small")
    assert (good.code, good.out) == (0, "2 rows are valid, 2 of tool_call; 0 are not\n")
    with (sums.folder / "rows.jsonl").open("a") as file:
        file.write('{"responses_create_params": {}}\n')
    bad = sums.run("gymsdk tasks --config sums.yaml --dataset small")
    assert (bad.code, bad.out.startswith("rows.jsonl:3: ")) == (1, True)


def test_two_of_one_name_are_told_apart_by_their_servers(sums: Place) -> None:
    text = file("sums.yaml").replace(
        "tool_call: {entrypoint: app.py}", "tool_call: {datasets: [{name: small, jsonl_fpath: rows.jsonl}]}"
    )
    sums.write("sums.yaml", text)
    ended = sums.run("gymsdk rollout --config sums.yaml --dataset small --output out")
    assert (
        "--dataset small: several datasets have this name; write one of assistant.small and assistant_agent.small"
        in ended.err
    )
    assert sums.run("gymsdk rollout --config sums.yaml --dataset assistant.small --output out").code == 0
    assert rewards(sums, "out") == [1.0] * 2
