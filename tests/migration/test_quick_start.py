"""One machine: the quick start of NeMo Gym's page, what its head serves, and what is collected."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from gymsdk import ServerClient
from migration.page import ROOT, TABLE, covers, gymsdk_command, nemo_gym_command
from migration.workspace import KEY, WITHOUT_RAY, Workspace, fetch_config, find_free_port, write_rows

AGENT = "example_single_tool_call_simple_agent"
LONG = """config_paths="resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml,\\
responses_api_models/openai_model/configs/openai_model.yaml"

"""
COLLECT = f"ng_collect_rollouts +agent_name={AGENT} +input_jsonl_fpath=rows.jsonl +output_jsonl_fpath=out/out.jsonl"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Workspace]:
    """Yield a workspace in which the quick start is running."""
    workspace = Workspace(tmp_path_factory.mktemp("quick"), engine)
    workspace.write("env.yaml", f"{KEY}policy_base_url: {engine}\npolicy_model_name: policy\n")
    write_rows(workspace, "tool_call")
    with workspace.serve(workspace.with_head_port(nemo_gym_command(1))):
        yield workspace


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@covers(1, 43, 44, 45, 46)
def test_the_quick_start_collects_rollouts_into_the_files_of_nemo_gym(started: Workspace) -> None:
    arguments = "+limit=3 +num_repeats=2 +num_samples_in_parallel=2 +responses_create_params.temperature=0.5"
    result = started.run(started.with_head_port(f"{COLLECT} {arguments}"))
    assert (result.code, "scored" in result.out) == (0, True), result.err
    out = started.folder / "out"
    assert [rollout["reward"] for rollout in read_lines(out / "out.jsonl")] == [1.0] * 6
    inputs = read_lines(out / "out_materialized_inputs.jsonl")
    assert [(row["agent_ref"], row["responses_create_params"]["temperature"]) for row in inputs] == [
        ({"type": "responses_api_agents", "name": AGENT}, 0.5)
    ] * 6
    assert [(row["_ng_task_index"], row["_ng_rollout_index"]) for row in inputs] == [
        (task, repeat) for task in range(3) for repeat in range(2)
    ]
    assert (out / "out_failures.jsonl").read_text() == ""
    [figures] = json.loads((out / "out_aggregate_metrics.json").read_text())
    assert figures["agent_metrics"]["mean/reward"] == 1.0


@covers(43, 46)
def test_a_collection_resumes_or_starts_over_and_never_appends(started: Workspace) -> None:
    command = started.with_head_port(COLLECT.replace("out/", "again/"))
    codes = [started.run(f"{command} {arguments}").code for arguments in ("+limit=1", "+limit=2", "+limit=2")]
    resumed = started.run(f"{command} +limit=2 +resume_from_cache=true")
    assert (codes, resumed.code) == ([0, 0, 0], 0)
    assert "2 of 2 rollouts were finished before" in resumed.err
    assert len(read_lines(started.folder / "again" / "out.jsonl")) == 2


@covers(43, 44, 45)
def test_the_gymsdk_command_does_the_same(started: Workspace) -> None:
    command = gymsdk_command(43).replace("NAME", AGENT) + f" {gymsdk_command(44).replace('N', '2')} --temperature 0.5"
    assert started.run(command).code == 0
    assert [rollout["reward"] for rollout in read_lines(started.folder / "folder" / "rollouts.jsonl")] == [1.0] * 4


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("+num_repeat=2", "there is no setting 'num_repeat'; did you mean 'num_repeats'?"),
        ("+num_repeats=often", "num_repeats: input should be a valid integer"),
        ("+num_repeats_add_seed=true", "num_repeats_add_seed has no equivalent in gymsdk; leave it out, and"),
        ("+input_jsonl_fpath=none.jsonl", "there is no file none.jsonl"),
    ],
)
def test_invalid_arguments_are_rejected_with_an_explanation(started: Workspace, arguments: str, expected: str) -> None:
    result = started.run(started.with_head_port(f"{COLLECT.replace('out/', 'no/')} {arguments}"))
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert expected in result.err
    assert not (started.folder / "no").exists()


def test_files_that_gymsdk_did_not_write_are_not_replaced(started: Workspace) -> None:
    (started.folder / "theirs.jsonl").write_text("precious\n")
    result = started.run(started.with_head_port(COLLECT.replace("out/out", "theirs")))
    assert (result.code, (started.folder / "theirs.jsonl").read_text()) == (2, "precious\n")
    assert "theirs.jsonl would be replaced" in result.err


@covers(7, 9)
def test_the_head_lists_servers_with_the_fields_of_nemo_gyms_example(started: Workspace) -> None:
    found = {instance["process_name"]: instance for instance in json.loads(started.run(nemo_gym_command(7)).out)}
    server = found["example_single_tool_call"]
    assert {key: server[key] for key in ("server_type", "name", "host", "status")} == {
        "server_type": "resources_servers",
        "name": "example_single_tool_call",
        "host": "127.0.0.1",
        "status": "success",
    }
    assert set(TABLE[9].nemo_gym) <= set(server)
    assert set(found) >= {AGENT, "policy_model"}


@covers(8, 40)
def test_the_head_serves_a_configuration_without_keys(started: Workspace) -> None:
    output = started.run(nemo_gym_command(8)).out
    assert "sk-your-openai-key" not in output
    assert AGENT in fetch_config(started.head)
    for route in TABLE[40].gymsdk:
        assert httpx.get(started.head + route).status_code == 200
    shown = started.run(f'gymsdk config "{nemo_gym_command(1).split(chr(34))[1]}"')
    assert (shown.code, re.search(r'policy_api_key: "\*\*\*" +# env.yaml:1', shown.out) is not None) == (0, True)


@covers(15)
def test_both_commands_report_the_same_status(started: Workspace) -> None:
    result = started.run(f"{nemo_gym_command(15)} +head_server.port=11000")
    assert (result.code, "4 of 4 expected servers registered" in result.out) == (0, True)
    assert (
        started.run(f"{gymsdk_command(15)} --head {started.head}").out.splitlines()[-1] == result.out.splitlines()[-1]
    )
    output = json.loads(started.run("ng_status +head_server.port=11000 +json=true").out)
    assert output["ok"]


@covers(15)
def test_a_missing_head_is_reported_in_a_sentence(workspace: Workspace) -> None:
    result = workspace.run("ng_status +head_server.port=11000")
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith("Error: ")


@covers(16)
def test_the_status_has_the_fields_that_the_page_names(started: Workspace) -> None:
    output = json.loads(started.run(f"{gymsdk_command(7, 0)} --head {started.head}").out)
    assert {"expected", "registered"} <= set(output)
    assert {"exit_code", "gpus", "round_trip", "wrong"} <= set(output["servers"][0])
    # The time that a command takes to start depends on the machine.
    results = (
        started.run(f"timeout -s INT {seconds} {gymsdk_command(16, 1)} --head {started.head}")
        for seconds in (3, 10, 40)
    )
    assert any("4 of 4" in result.out for result in results)


@covers(10)
async def test_servers_call_each_other_by_name(started: Workspace) -> None:
    client = ServerClient(started.head)
    row = json.loads((started.folder / "rows.jsonl").read_text().splitlines()[0])
    played = (await client.post(server_name=AGENT, url_path="/run", json=row)).json()
    payload = row | {"response": played["response"]}
    answer = await client.post(server_name="example_single_tool_call", url_path="/verify", json=payload)
    assert answer.json()["reward"] == 1.0
    assert nemo_gym_command(10).removeprefix("await self.server_client.") == gymsdk_command(10).removeprefix(
        "await ServerClient(head)."
    )


@covers(37, 38, 39)
async def test_each_kind_of_server_has_the_routes_of_nemo_gym(started: Workspace) -> None:
    names = {37: "example_single_tool_call", 38: "policy_model", 39: AGENT}
    urls = await ServerClient(started.head).servers()
    async with httpx.AsyncClient() as client:
        for number, name in names.items():
            paths = (await client.get(f"{urls[name]}/openapi.json")).json()["paths"]
            expected = [route.removeprefix("POST ") for route in TABLE[number].nemo_gym]
            assert [path for path in expected if "post" not in paths[path]] == []


@covers(1)
def test_the_gymsdk_command_serves_the_same_model(workspace: Workspace) -> None:
    write_rows(workspace, "tool_call", 1)
    row = json.loads((workspace.folder / "rows.jsonl").read_text())
    with workspace.serve(workspace.with_head_port(gymsdk_command(1))) as server:
        answer = httpx.post(f"{server.url('tool_call_simple_agent')}/run", json=row, timeout=30)
    assert answer.json()["reward"] == 1.0


@covers(2, 31, 33, 47)
@WITHOUT_RAY
def test_config_paths_can_come_from_a_variable_and_the_servers_run_without_ray(workspace: Workspace) -> None:
    with workspace.serve(
        workspace.with_head_port(LONG + nemo_gym_command(2)), RAY_ADDRESS="ray://nowhere:10001"
    ) as server:
        assert set(fetch_config(workspace.head)) >= {"example_single_tool_call", AGENT, "policy_model"}
    assert server.out.count("none, because Ray is not installed") == 1
    assert "ray" not in "".join(server.err).lower()


@covers(2)
def test_each_server_is_a_separate_process_on_request(workspace: Workspace) -> None:
    paths = LONG.split('"')[1].replace("\\\n", "").split(",")
    workspace.write("a.yaml", f"config_paths: [{paths[0]}]\n")
    workspace.write("b.yaml", f"config_paths: [{paths[1]}]\n")
    with workspace.serve(workspace.with_head_port(gymsdk_command(2))):
        until = time.monotonic() + 30
        found: list[dict[str, object]] = []
        # The processes register one after the other.
        while len(found) < 4 and time.monotonic() < until:
            found = httpx.get(f"{workspace.head}/server_instances").json()
            time.sleep(0.1)
    assert len({instance["pid"] for instance in found}) == len(found) == 4


@covers(11)
def test_the_head_uses_port_11000_and_every_other_server_a_free_port(workspace: Workspace) -> None:
    workspace.write("none.yaml", "default_host: 127.0.0.1\n")
    shown = workspace.run("gymsdk config --config none.yaml")
    assert re.search(r"port: (\d+) +# default", shown.out)[1] == "11000"
    port = find_free_port()
    with workspace.serve(workspace.with_head_port(f"{gymsdk_command(1)} --server-port tool_call={port}")) as server:
        assert server.url("tool_call") == f"http://127.0.0.1:{port}"
        assert server.url("head") == workspace.head


@pytest.mark.skipif(not (ROOT / "compat").is_dir(), reason="the sources are not in reach of tests of the wheels")
@covers(18)
def test_the_readme_starts_with_an_installation_from_a_checkout() -> None:
    assert nemo_gym_command(18, 1) == 'pip install -e ".[dev]"'
    assert '.venv/bin/pip install -e ".[dev]"' in (ROOT / "README.md").read_text()
    assert "command_of 'Run it'" in (ROOT / ".ci" / "run").read_text()


def stop_after_first_rollout(workspace: Workspace, command: str) -> str:
    """Stop *command* as soon as one rollout exists and return its error output."""
    arguments = ["bash", "-c", f"exec {workspace.localize(command)}"]
    with subprocess.Popen(
        arguments, cwd=workspace.folder, env=workspace.variables, stderr=subprocess.PIPE, text=True
    ) as process:
        out, deadline = workspace.folder / "out.jsonl", time.monotonic() + 60
        while not (out.exists() and out.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=30)[1]


def test_an_interrupted_collection_keeps_its_rollouts_and_can_resume(workspace: Workspace) -> None:
    workspace.write("script.jsonl", '{"text": "I do not know."}\n')
    write_rows(workspace, "tool_call", 4)
    with workspace.serve("gymsdk policy serve script:script.jsonl --port 0 --latency 0.4") as engine:
        workspace.engine = engine.url("policy")
        with workspace.serve(workspace.with_head_port(gymsdk_command(1))):
            arguments = "+agent_name=tool_call_simple_agent +input_jsonl_fpath=rows.jsonl +output_jsonl_fpath=out.jsonl"
            command = workspace.with_head_port(f"ng_collect_rollouts {arguments} +num_samples_in_parallel=1")
            stopped = stop_after_first_rollout(workspace, command)
            finished = len(read_lines(workspace.folder / "out.jsonl"))
            result = workspace.run(f"{command} +resume_from_cache=true")
    assert stopped.endswith("stopped; to continue, run the same command with +resume_from_cache=true\n"), stopped
    assert 0 < finished < 4
    assert (result.code, len(read_lines(workspace.folder / "out.jsonl"))) == (0, 4)
    assert f"{finished} of 4 rollouts were finished before" in result.err


@pytest.mark.parametrize("command", ["ng_run", "ng_status", "ng_collect_rollouts"])
def test_help_describes_the_command(workspace: Workspace, command: str) -> None:
    output = workspace.run(f"{command} --help")
    assert (output.code, output.out.startswith(f"{command} "), "gymsdk" in output.out) == (0, True, True)


def test_ng_run_without_arguments_is_rejected_with_an_explanation(workspace: Workspace) -> None:
    result = workspace.run("ng_run")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert '"+config_paths=[config.yaml]"' in result.err
