"""Several machines: coordinator, workers and explicit ports, on loopback addresses."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from migration.page import covers, gymsdk_command, nemo_gym_command, page_file
from migration.workspace import Workspace, fetch_config, find_free_port, write_rows

AGENT = "example_resources_simple_agent"
EXPLICIT = '{name}:\n  resources_servers:\n    {name}:\n      host: "0.0.0.0"\n      port: 8080  # Explicit port\n'


@pytest.fixture
def nodes(workspace: Workspace) -> Workspace:
    """Return a workspace with the files of the page, and rows."""
    for name in ("coordinator-config.yaml", "worker-config.yaml"):
        workspace.write(name, page_file(name))
    workspace.ports["10240"] = workspace.ports["8000"]
    write_rows(workspace, "tool_call", 3)
    return workspace


def collect(workspace: Workspace, output: str) -> list[float]:
    arguments = f"+agent_name={AGENT} +input_jsonl_fpath=rows.jsonl +output_jsonl_fpath={output}"
    head = "+head_server.host=192.168.1.100 +head_server.port=11000"
    result = workspace.run(f"ng_collect_rollouts {arguments} {head}")
    assert result.code == 0, result.err
    return [json.loads(line)["reward"] for line in (workspace.folder / output).read_text().splitlines()]


@covers(3, 4, 5, 6)
def test_coordinator_and_worker_files_collect_rollouts_together(nodes: Workspace) -> None:
    with nodes.serve(nemo_gym_command(5)) as head, nodes.serve(nemo_gym_command(6)):
        assert head.url("example_resources") == nodes.localize("http://192.168.1.100:8080")
        served = fetch_config(nodes.localize("http://192.168.1.100:11000"))
        block = served["policy_model"]["responses_api_models"]["openai_model"]
        assert (block["host"], block["port"]) == ("127.0.0.3", nodes.ports["8000"])
        assert collect(nodes, "out.jsonl") == [1.0] * 3


@covers(5, 6)
def test_gymsdk_commands_start_them_in_the_other_order(nodes: Workspace) -> None:
    # Every address here belongs to this machine, so the first command to run starts the head.
    with nodes.serve(gymsdk_command(6)), nodes.serve(gymsdk_command(5)):
        assert collect(nodes, "out.jsonl") == [1.0] * 3


@covers(14, 36)
def test_another_worker_is_another_instance(nodes: Workspace) -> None:
    worker = (nodes.folder / "worker-config.yaml").read_text()
    nodes.write("second.yaml", worker.replace("127.0.0.3", "127.0.0.4"))
    with (
        nodes.serve(nemo_gym_command(5)),
        nodes.serve(nemo_gym_command(14)),
        nodes.serve(gymsdk_command(14).replace("worker-config", "second")),
    ):
        found = json.loads(nodes.run(nemo_gym_command(14, 1)).out)
        hosts = {instance["host"] for instance in found if instance["process_name"] == "policy_model"}
        assert hosts == {"127.0.0.3", "127.0.0.4"}
        assert collect(nodes, "out.jsonl") == [1.0] * 3
        status = nodes.run(f"{gymsdk_command(14, 1)} --head http://192.168.1.100:11000")
        assert (status.code, status.out.count("policy_model")) == (0, 2)


@covers(36)
def test_a_second_node_with_the_same_file_shares_the_sessions(nodes: Workspace) -> None:
    first = (nodes.folder / "coordinator-config.yaml").read_text()
    further = first.replace("127.0.0.2", "127.0.0.5").replace('host: "127.0.0.5"', 'host: "127.0.0.2"', 1)
    nodes.write("further.yaml", further)
    with (
        nodes.serve(nemo_gym_command(5)),
        nodes.serve("gymsdk serve --config further.yaml"),
        nodes.serve(nemo_gym_command(6)),
    ):
        assert collect(nodes, "out.jsonl") == [1.0] * 3
        found = httpx.get(nodes.localize("http://192.168.1.100:11000/server_instances")).json()
        assert sum(instance["process_name"] == "example_resources" for instance in found) == 2


@covers(6)
def test_a_stopped_worker_is_removed_from_the_head(nodes: Workspace) -> None:
    with nodes.serve(nemo_gym_command(5)):
        with nodes.serve(nemo_gym_command(6)):
            pass
        deadline = time.monotonic() + 15
        while "policy_model" in fetch_config(nodes.localize("http://192.168.1.100:11000")):
            assert time.monotonic() < deadline
            time.sleep(0.2)


@covers(12)
def test_an_explicit_port_on_all_addresses_requires_a_token_or_insecure(workspace: Workspace) -> None:
    workspace.write("ports.yaml", EXPLICIT.format(name="tool_call"))
    command = f"ng_run +config_paths=[ports.yaml] +head_server.port={workspace.ports['11000']}"
    refused = workspace.run(command)
    assert (refused.code, "token" in refused.err, "insecure" in refused.err) == (2, True, True), refused.err
    with workspace.serve(f"{command} +insecure=true"):
        assert httpx.get(workspace.localize("http://127.0.0.1:8080/")).status_code == 200


@covers(12)
def test_an_unknown_environment_is_reported_with_its_line(workspace: Workspace) -> None:
    workspace.write("ports.yaml", EXPLICIT.format(name="my_resources").replace("    my_resources", "    tool_cal"))
    result = workspace.run("ng_run +config_paths=[ports.yaml]")
    assert result.code == 2
    assert result.err.startswith("Error: ports.yaml:3: my_resources: no environment named 'tool_cal' is installed")
    assert "did you mean 'tool_call'?" in result.err


@covers(13)
def test_one_process_per_kind_of_server_plays_rollouts(workspace: Workspace) -> None:
    write_rows(workspace, "tool_call", 2)
    workspace.write("head.yaml", "head_server: {port: 11000}\n")
    head = f"--head {workspace.head}"
    with (
        workspace.serve("ng_run +config_paths=[head.yaml]"),
        workspace.serve(gymsdk_command(13)),
        workspace.serve(f"gymsdk serve tool_call --role agent {head}"),
        workspace.serve(f"gymsdk serve --role model --model vllm/policy --base-url http://127.0.0.1:8000/v1 {head}"),
    ):
        result = workspace.run(f"gymsdk rollout {head} --tasks rows.jsonl --agent tool_call_simple_agent --output out")
    assert result.code == 0, result.err


@covers(13)
def test_one_file_per_server_plays_rollouts(workspace: Workspace) -> None:
    write_rows(workspace, "tool_call", 2)
    head_block = f"head_server: {{host: 127.0.0.1, port: {find_free_port()}}}\n"
    workspace.ports["11000"] = int(head_block.rpartition(" ")[2].rstrip("}\n"))
    one = "tool_call:\n  resources_servers:\n    tool_call: {entrypoint: app.py}\n"
    other = "policy_model:\n  responses_api_models:\n    vllm_model: {entrypoint: app.py}\n"
    for name, text in (("resources.yaml", one), ("model.yaml", other)):
        workspace.write(name, head_block + text)
    with (
        workspace.serve('ng_run "+config_paths=[resources.yaml]"'),
        workspace.serve('ng_run "+config_paths=[model.yaml]"'),
    ):
        result = workspace.run(
            "ng_collect_rollouts +agent_name=tool_call_simple_agent +input_jsonl_fpath=rows.jsonl"
            " +output_jsonl_fpath=out.jsonl +head_server.port=11000"
        )
    assert result.code == 0, result.err
