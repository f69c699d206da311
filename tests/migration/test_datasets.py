"""Datasets of a configuration, played by name."""

from __future__ import annotations

import json

import pytest

from migration.page import page_file
from migration.workspace import Workspace, write_rows


@pytest.fixture
def sums(workspace: Workspace) -> Workspace:
    """Return a workspace with the page's configuration and the rows it lists."""
    workspace.write("sums.yaml", page_file("sums.yaml"))
    write_rows(workspace, "tool_call", 2)
    return workspace


def read_rewards(workspace: Workspace, folder: str) -> list[float]:
    return [
        json.loads(line)["reward"] for line in (workspace.folder / folder / "rollouts.jsonl").read_text().splitlines()
    ]


def test_a_dataset_is_played_with_the_repeats_and_the_model_of_the_configuration(sums: Workspace) -> None:
    result = sums.run("gymsdk rollout --config sums.yaml --dataset small --output out")
    assert (result.code, read_rewards(sums, "out")) == (0, [1.0] * 4), result.err
    about = json.loads((sums.folder / "out" / "run.json").read_text())
    assert about["settings"]["model"] == "scripted/oracle"


def test_options_override_the_model_and_the_repeats(sums: Workspace) -> None:
    result = sums.run(
        "gymsdk rollout --config sums.yaml --dataset small --model scripted/null --repeats 1 --output out"
    )
    assert (result.code, len(read_rewards(sums, "out"))) == (0, 2), result.err


def test_the_model_of_the_configuration_is_called_with_its_own_address_and_key(sums: Workspace) -> None:
    sums.write(
        "other.yaml",
        "policy_model: {_delete_key: true, responses_api_models: {vllm_model: {base_url: "
        f"'{sums.engine}', api_key: hush-hush, model: policy}}}}}}\n",
    )
    options = "--config sums.yaml --config other.yaml --dataset small"
    result = sums.run(f"gymsdk rollout {options} --output out")
    assert (result.code, read_rewards(sums, "out")) == (0, [1.0] * 4), result.err
    expected = (sums.folder / "out" / "run.json").read_text()
    assert (json.loads(expected)["base_url"], "hush" in expected) == (sums.engine, False)


def test_servers_play_a_dataset_with_the_agent_that_lists_it(sums: Workspace) -> None:
    with sums.serve(sums.with_head_port("gymsdk serve --config sums.yaml")):
        result = sums.run(f"gymsdk rollout --config sums.yaml --dataset small --head {sums.head} --output out")
    assert (result.code, read_rewards(sums, "out")) == (0, [1.0] * 4), result.err
    [figures] = json.loads((sums.folder / "out" / "metrics.json").read_text())
    assert figures["agent_ref"]["name"] == "assistant_agent"


@pytest.mark.parametrize(
    ("options", "expected"),
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
def test_conflicting_options_are_rejected_with_an_explanation(sums: Workspace, options: str, expected: str) -> None:
    result = sums.run(f"gymsdk rollout --config sums.yaml {options} --output out")
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert expected in result.err
    assert not (sums.folder / "out").exists()


def test_a_missing_file_is_reported_with_the_line_that_names_it(sums: Workspace) -> None:
    (sums.folder / "rows.jsonl").unlink()
    result = sums.run("gymsdk rollout --config sums.yaml --dataset small --output out")
    assert (
        result.code,
        result.err.startswith("Error: sums.yaml:10: the file rows.jsonl of dataset 'small' does not exist"),
    ) == (
        2,
        True,
    )


def test_the_rows_of_a_dataset_can_be_validated_without_a_rollout(sums: Workspace) -> None:
    good = sums.run("gymsdk tasks --config sums.yaml --dataset small")
    assert (good.code, good.out) == (0, "2 rows are valid, 2 of tool_call; 0 are not\n")
    with (sums.folder / "rows.jsonl").open("a") as page_file:
        page_file.write('{"responses_create_params": {}}\n')
    bad = sums.run("gymsdk tasks --config sums.yaml --dataset small")
    assert (bad.code, bad.out.startswith("rows.jsonl:3: ")) == (1, True)


def test_datasets_with_the_same_name_are_selected_by_server(sums: Workspace) -> None:
    text = page_file("sums.yaml").replace(
        "tool_call: {entrypoint: app.py}", "tool_call: {datasets: [{name: small, jsonl_fpath: rows.jsonl}]}"
    )
    sums.write("sums.yaml", text)
    result = sums.run("gymsdk rollout --config sums.yaml --dataset small --output out")
    assert (
        "--dataset small: several datasets have this name; write one of assistant.small and assistant_agent.small"
        in result.err
    )
    assert sums.run("gymsdk rollout --config sums.yaml --dataset assistant.small --output out").code == 0
    assert read_rewards(sums, "out") == [1.0] * 2
