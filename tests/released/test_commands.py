"""Run NeMo Gym commands inside a checkout of a released version, where relative paths name its files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from migration.page import gymsdk_command, nemo_gym_command
from migration.workspace import KEY, Workspace, fetch_config, write_rows

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
    workspace = Workspace(tmp_path_factory.mktemp("engines"))
    command = "gymsdk policy serve oracle --env {} --port 0"
    with (
        workspace.serve(command.format("tool_call")) as tool_call,
        workspace.serve(command.format("multineedle")) as multineedle,
        workspace.serve(command.format("math")) as math,
    ):
        servers = {"tool_call": tool_call, "multineedle": multineedle, "math": math}
        yield {name: entry.url("policy") for name, entry in servers.items()}


@pytest.fixture
def checkout(released: Path, policy_urls: dict[str, str], tmp_path: Path) -> Workspace:
    """Return a folder with the files of the released version, configured for the policy of `tool_call`."""
    for path in released.iterdir():
        (tmp_path / path.name).symlink_to(path)
    return set_policy(Workspace(tmp_path), policy_urls["tool_call"])


def set_policy(workspace: Workspace, url: str) -> Workspace:
    workspace.engine = url
    workspace.write("env.yaml", f"{KEY}policy_base_url: {url}\npolicy_model_name: policy\n")
    return workspace


def play_row(environment: str, url: str) -> object:
    row = next(iter(load(environment).tasks("train", seed=0))).row()
    answer = httpx.post(f"{url}/run", json=row, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()["reward"]


@pytest.mark.parametrize("command", [nemo_gym_command(1), f"gymsdk serve --config {ENVIRONMENT} --config {OPENAI}"])
def test_the_quick_start_works_with_the_files_of_the_checkout(checkout: Workspace, command: str) -> None:
    with checkout.serve(checkout.with_head_port(command)) as server:
        assert play_row("tool_call", server.url(AGENT)) == 1.0
        write_rows(checkout, "tool_call", 2)
        options = f"+agent_name={AGENT} +input_jsonl_fpath=rows.jsonl +output_jsonl_fpath=out/out.jsonl"
        completed = checkout.run(checkout.with_head_port(f"ng_collect_rollouts {options}"))
        served = fetch_config(checkout.head)
    assert completed.code == 0, completed.err
    lines = (checkout.folder / "out" / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [1.0, 1.0]
    # The built-in configuration of this name has no environment server. The file of 0.7 has an environment server.
    if (checkout.folder / "environment_servers").is_dir():
        assert "example_single_tool_call_environment_server" in served


@pytest.mark.parametrize("number", [26, 29])
def test_the_vllm_configuration_comes_from_the_checkout(
    checkout: Workspace, policy_urls: dict[str, str], number: int
) -> None:
    set_policy(checkout, policy_urls["multineedle"])
    paths = nemo_gym_command(26).split("[")[1].split("]")[0]
    command = checkout.with_head_port(nemo_gym_command(number))
    with checkout.serve(f'config_paths="{paths}"\n{command}') as server:
        assert play_row("multineedle", server.url("multineedle_simple_agent")) == 1.0


@pytest.mark.parametrize(
    "command", [f'ng_run "+config_paths=[{MATH},{VLLM}]"', f"gymsdk serve --config {MATH} --config {VLLM}"]
)
def test_math_works_with_the_configuration_of_the_checkout(
    checkout: Workspace, policy_urls: dict[str, str], command: str
) -> None:
    set_policy(checkout, policy_urls["math"])
    with checkout.serve(checkout.with_head_port(command)) as server:
        assert play_row("math", server.url("math_with_judge_simple_agent")) == 1.0


def test_an_agent_without_a_resources_server_is_rejected_with_the_cause(checkout: Workspace) -> None:
    completed = checkout.run(checkout.with_head_port(nemo_gym_command(20)))
    assert (completed.code, completed.err.count("\n"), "resources_server" in completed.err) == (2, 1, True), (
        completed.err
    )


def test_the_gymsdk_command_does_the_same(checkout: Workspace) -> None:
    with checkout.serve(checkout.with_head_port(gymsdk_command(1))) as server:
        assert play_row("tool_call", server.url("tool_call_simple_agent")) == 1.0


def test_the_dataset_of_a_configuration_comes_from_the_checkout(checkout: Workspace) -> None:
    count = len((checkout.folder / ROWS).read_text().splitlines())
    completed = checkout.run(f"gymsdk tasks --config {ENVIRONMENT} --dataset example")
    assert completed.out.startswith(f"{count} rows are valid"), completed.out + completed.err


def test_ignored_settings_are_shown_with_their_file(checkout: Workspace) -> None:
    shown = checkout.run(f'gymsdk config "+config_paths=[{ENVIRONMENT},{VLLM}]"')
    assert (shown.code, "# " + VLLM in shown.out) == (0, True), shown.err
