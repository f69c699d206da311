"""Several machines: coordinator, workers and explicit ports, on addresses of the loopback."""

from __future__ import annotations

import json
import time

import httpx
import pytest

from seeds.page import file, ours, theirs, tries
from seeds.place import Place, config, free, rows

AGENT = "example_resources_simple_agent"
EXPLICIT = '{name}:\n  resources_servers:\n    {name}:\n      host: "0.0.0.0"\n      port: 8080  # Explicit port\n'


@pytest.fixture
def nodes(place: Place) -> Place:
    """A place with the files of the page, and rows."""
    for name in ("coordinator-config.yaml", "worker-config.yaml"):
        place.write(name, file(name))
    place.ports["10240"] = place.ports["8000"]
    rows(place, "tool_call", 3)
    return place


def collected(place: Place, output: str) -> list[float]:
    words = f"+agent_name={AGENT} +input_jsonl_fpath=rows.jsonl +output_jsonl_fpath={output}"
    where = "+head_server.host=192.168.1.100 +head_server.port=11000"
    ended = place.run(f"ng_collect_rollouts {words} {where}")
    assert ended.code == 0, ended.err
    return [json.loads(line)["reward"] for line in (place.folder / output).read_text().splitlines()]


@tries(3, 4, 5, 6)
def test_the_coordinator_s_and_the_worker_s_files_make_rollouts_together(nodes: Place) -> None:
    with nodes.serving(theirs(5)) as head, nodes.serving(theirs(6)):
        assert head.url("example_resources") == nodes.here("http://192.168.1.100:8080")
        told = config(nodes.here("http://192.168.1.100:11000"))
        block = told["policy_model"]["responses_api_models"]["openai_model"]
        assert (block["host"], block["port"]) == ("127.0.0.3", nodes.ports["8000"])
        assert collected(nodes, "out.jsonl") == [1.0] * 3


@tries(5, 6)
def test_gymsdk_s_own_words_start_them_in_the_other_order(nodes: Place) -> None:
    # Here every address is this machine's own: whoever comes first starts the head.
    with nodes.serving(ours(6)), nodes.serving(ours(5)):
        assert collected(nodes, "out.jsonl") == [1.0] * 3


@tries(14, 36)
def test_a_further_worker_is_a_further_instance(nodes: Place) -> None:
    worker = (nodes.folder / "worker-config.yaml").read_text()
    nodes.write("second.yaml", worker.replace("127.0.0.3", "127.0.0.4"))
    with (
        nodes.serving(theirs(5)),
        nodes.serving(theirs(14)),
        nodes.serving(ours(14).replace("worker-config", "second")),
    ):
        found = json.loads(nodes.run(theirs(14, 1)).out)
        at = {each["host"] for each in found if each["process_name"] == "policy_model"}
        assert at == {"127.0.0.3", "127.0.0.4"}
        assert collected(nodes, "out.jsonl") == [1.0] * 3
        status = nodes.run(f"{ours(14, 1)} --head http://192.168.1.100:11000")
        assert (status.code, status.out.count("policy_model")) == (0, 2)


@tries(36)
def test_a_second_node_with_the_same_file_shares_the_sessions(nodes: Place) -> None:
    first = (nodes.folder / "coordinator-config.yaml").read_text()
    further = first.replace("127.0.0.2", "127.0.0.5").replace('host: "127.0.0.5"', 'host: "127.0.0.2"', 1)
    nodes.write("further.yaml", further)
    with nodes.serving(theirs(5)), nodes.serving("gymsdk serve --config further.yaml"), nodes.serving(theirs(6)):
        assert collected(nodes, "out.jsonl") == [1.0] * 3
        found = httpx.get(nodes.here("http://192.168.1.100:11000/server_instances")).json()
        assert sum(each["process_name"] == "example_resources" for each in found) == 2


@tries(6)
def test_a_worker_that_ends_is_gone_from_the_head(nodes: Place) -> None:
    with nodes.serving(theirs(5)):
        with nodes.serving(theirs(6)):
            pass
        until = time.monotonic() + 15
        while "policy_model" in config(nodes.here("http://192.168.1.100:11000")):
            assert time.monotonic() < until
            time.sleep(0.2)


@tries(12)
def test_an_explicit_port_on_all_addresses_needs_a_token_or_to_be_insecure(place: Place) -> None:
    place.write("ports.yaml", EXPLICIT.format(name="tool_call"))
    command = f"ng_run +config_paths=[ports.yaml] +head_server.port={place.ports['11000']}"
    refused = place.run(command)
    assert (refused.code, "token" in refused.err, "insecure" in refused.err) == (2, True, True), refused.err
    with place.serving(f"{command} +insecure=true"):
        assert httpx.get(place.here("http://127.0.0.1:8080/")).status_code == 200


@tries(12)
def test_a_name_that_no_environment_has_is_an_error_with_its_line(place: Place) -> None:
    place.write("ports.yaml", EXPLICIT.format(name="my_resources").replace("    my_resources", "    tool_cal"))
    ended = place.run("ng_run +config_paths=[ports.yaml]")
    assert ended.code == 2
    assert ended.err.startswith("Error: ports.yaml:3: my_resources: no environment named 'tool_cal' is installed")
    assert "did you mean 'tool_call'?" in ended.err


@tries(13)
def test_a_process_for_each_kind_of_server_makes_rollouts(place: Place) -> None:
    rows(place, "tool_call", 2)
    place.write("head.yaml", "head_server: {port: 11000}\n")
    head = f"--head {place.head}"
    with (
        place.serving("ng_run +config_paths=[head.yaml]"),
        place.serving(ours(13)),
        place.serving(f"gymsdk serve tool_call --role agent {head}"),
        place.serving(f"gymsdk serve --role model --model vllm/policy --base-url http://127.0.0.1:8000/v1 {head}"),
    ):
        ended = place.run(f"gymsdk rollout {head} --tasks rows.jsonl --agent tool_call_simple_agent --output out")
    assert ended.code == 0, ended.err


@tries(13)
def test_a_file_for_each_server_does_the_same(place: Place) -> None:
    rows(place, "tool_call", 2)
    above = f"head_server: {{host: 127.0.0.1, port: {free()}}}\n"
    place.ports["11000"] = int(above.rpartition(" ")[2].rstrip("}\n"))
    one = "tool_call:\n  resources_servers:\n    tool_call: {entrypoint: app.py}\n"
    other = "policy_model:\n  responses_api_models:\n    vllm_model: {entrypoint: app.py}\n"
    for name, text in (("resources.yaml", one), ("model.yaml", other)):
        place.write(name, above + text)
    with place.serving('ng_run "+config_paths=[resources.yaml]"'), place.serving('ng_run "+config_paths=[model.yaml]"'):
        ended = place.run(
            "ng_collect_rollouts +agent_name=tool_call_simple_agent +input_jsonl_fpath=rows.jsonl"
            " +output_jsonl_fpath=out.jsonl +head_server.port=11000"
        )
    assert ended.code == 0, ended.err
