"""Run NeMo Gym commands inside a checkout of a released version, where relative paths name its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from seeds.page import ours, theirs
from seeds.place import KEY, Place, config, rows

from gymsdk import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENVIRONMENT = "resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml"
OPENAI = "responses_api_models/openai_model/configs/openai_model.yaml"
VLLM = "responses_api_models/vllm_model/configs/vllm_model.yaml"
MATH = "resources_servers/math_with_judge/configs/math_with_judge.yaml"
ROWS = Path("resources_servers/example_single_tool_call/data/example.jsonl")
AGENT = "example_single_tool_call_simple_agent"


@pytest.fixture(scope="module")
def policy_urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start a policy server for each environment; yield the URLs by environment name."""
    place = Place(tmp_path_factory.mktemp("engines"))
    command = "gymsdk policy serve oracle --env {} --port 0"
    with (
        place.serving(command.format("tool_call")) as tool_call,
        place.serving(command.format("multineedle")) as multineedle,
        place.serving(command.format("math")) as math,
    ):
        servers = {"tool_call": tool_call, "multineedle": multineedle, "math": math}
        yield {name: each.url("policy") for name, each in servers.items()}


@pytest.fixture
def checkout(released: Path, policy_urls: dict[str, str], tmp_path: Path) -> Place:
    """Return a folder with the files of the released version, configured for the policy of `tool_call`."""
    for each in released.iterdir():
        (tmp_path / each.name).symlink_to(each)
    return set_policy(Place(tmp_path), policy_urls["tool_call"])


def set_policy(place: Place, url: str) -> Place:
    place.engine = url
    place.write("env.yaml", f"{KEY}policy_base_url: {url}\npolicy_model_name: policy\n")
    return place


def play_row(environment: str, url: str) -> object:
    row = next(iter(load(environment).tasks("train", seed=0))).row()
    answer = httpx.post(f"{url}/run", json=row, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["reward"]


@pytest.mark.parametrize("command", [theirs(1), f"gymsdk serve --config {ENVIRONMENT} --config {OPENAI}"])
def test_the_quick_start_works_with_the_files_of_the_checkout(checkout: Place, command: str) -> None:
    with checkout.serving(checkout.at_head(command)) as server:
        assert play_row("tool_call", server.url(AGENT)) == 1.0
        rows(checkout, "tool_call", 2)
        options = f"+agent_name={AGENT} +input_jsonl_fpath=rows.jsonl +output_jsonl_fpath=out/out.jsonl"
        completed = checkout.run(checkout.at_head(f"ng_collect_rollouts {options}"))
        served = config(checkout.head)
    assert completed.code == 0, completed.err
    lines = (checkout.folder / "out" / "out.jsonl").read_text().splitlines()
    assert [json.loads(each)["reward"] for each in lines] == [1.0, 1.0]
    # The built-in configuration of this name has no environment server. The file of 0.7 has an environment server.
    if (checkout.folder / "environment_servers").is_dir():
        assert "example_single_tool_call_environment_server" in served


@pytest.mark.parametrize("number", [26, 29])
def test_the_vllm_configuration_comes_from_the_checkout(
    checkout: Place, policy_urls: dict[str, str], number: int
) -> None:
    set_policy(checkout, policy_urls["multineedle"])
    paths = theirs(26).split("[")[1].split("]")[0]
    command = checkout.at_head(theirs(number))
    with checkout.serving(f'config_paths="{paths}"\n{command}') as server:
        assert play_row("multineedle", server.url("multineedle_simple_agent")) == 1.0


@pytest.mark.parametrize(
    "command", [f'ng_run "+config_paths=[{MATH},{VLLM}]"', f"gymsdk serve --config {MATH} --config {VLLM}"]
)
def test_math_works_with_the_configuration_of_the_checkout(
    checkout: Place, policy_urls: dict[str, str], command: str
) -> None:
    set_policy(checkout, policy_urls["math"])
    with checkout.serving(checkout.at_head(command)) as server:
        assert play_row("math", server.url("math_with_judge_simple_agent")) == 1.0


def test_an_agent_without_a_resources_server_is_rejected_with_the_cause(checkout: Place) -> None:
    completed = checkout.run(checkout.at_head(theirs(20)))
    assert (completed.code, completed.err.count("\n"), "resources_server" in completed.err) == (2, 1, True), (
        completed.err
    )


def test_the_gymsdk_command_does_the_same(checkout: Place) -> None:
    with checkout.serving(checkout.at_head(ours(1))) as server:
        assert play_row("tool_call", server.url("tool_call_simple_agent")) == 1.0


def test_the_dataset_of_a_configuration_comes_from_the_checkout(checkout: Place) -> None:
    count = len((checkout.folder / ROWS).read_text().splitlines())
    completed = checkout.run(f"gymsdk tasks --config {ENVIRONMENT} --dataset example")
    assert completed.out.startswith(f"{count} rows are valid"), completed.out + completed.err


def test_ignored_settings_are_shown_with_their_file(checkout: Place) -> None:
    shown = checkout.run(f'gymsdk config "+config_paths=[{ENVIRONMENT},{VLLM}]"')
    assert (shown.code, "# " + VLLM in shown.out) == (0, True), shown.err
