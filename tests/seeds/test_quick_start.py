"""One machine: the quick start as NeMo Gym's page has it, what its head tells, what is collected."""

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
from seeds.page import ROOT, TABLE, ours, theirs, tries
from seeds.place import KEY, Place, config, free, rows

AGENT = "example_single_tool_call_simple_agent"
LONG = """config_paths="resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml,\\
responses_api_models/openai_model/configs/openai_model.yaml"

"""
COLLECT = f"ng_collect_rollouts +agent_name={AGENT} +input_jsonl_fpath=rows.jsonl +output_jsonl_fpath=out/out.jsonl"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, engine: str) -> Iterator[Place]:
    """A place in which the quick start has been typed."""
    place = Place(tmp_path_factory.mktemp("quick"), engine)
    place.write("env.yaml", f"{KEY}policy_base_url: {engine}\npolicy_model_name: policy\n")
    rows(place, "tool_call")
    with place.serving(place.at_head(theirs(1))):
        yield place


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@tries(1, 43, 44, 45, 46)
def test_the_quick_start_s_servers_collect_rollouts_into_nemo_gym_s_files(started: Place) -> None:
    words = "+limit=3 +num_repeats=2 +num_samples_in_parallel=2 +responses_create_params.temperature=0.5"
    ended = started.run(started.at_head(f"{COLLECT} {words}"))
    assert (ended.code, "scored" in ended.out) == (0, True), ended.err
    out = started.folder / "out"
    assert [each["reward"] for each in lines(out / "out.jsonl")] == [1.0] * 6
    sent = lines(out / "out_materialized_inputs.jsonl")
    assert [(each["agent_ref"], each["responses_create_params"]["temperature"]) for each in sent] == [
        ({"type": "responses_api_agents", "name": AGENT}, 0.5)
    ] * 6
    assert [(each["_ng_task_index"], each["_ng_rollout_index"]) for each in sent] == [
        (task, repeat) for task in range(3) for repeat in range(2)
    ]
    assert (out / "out_failures.jsonl").read_text() == ""
    [figures] = json.loads((out / "out_aggregate_metrics.json").read_text())
    assert figures["agent_metrics"]["mean/reward"] == 1.0


@tries(43, 46)
def test_a_collection_goes_on_or_begins_anew_and_never_adds(started: Place) -> None:
    command = started.at_head(COLLECT.replace("out/", "again/"))
    whole = [started.run(f"{command} {words}").code for words in ("+limit=1", "+limit=2", "+limit=2")]
    on = started.run(f"{command} +limit=2 +resume_from_cache=true")
    assert (whole, on.code) == ([0, 0, 0], 0)
    assert "2 of 2 rollouts were finished before" in on.err
    assert len(lines(started.folder / "again" / "out.jsonl")) == 2


@tries(43, 44, 45)
def test_gymsdk_s_own_command_does_the_same(started: Place) -> None:
    command = ours(43).replace("NAME", AGENT) + f" {ours(44).replace('N', '2')} --temperature 0.5"
    assert started.run(command).code == 0
    assert [each["reward"] for each in lines(started.folder / "folder" / "rollouts.jsonl")] == [1.0] * 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("+num_repeat=2", "there is no setting 'num_repeat'; did you mean 'num_repeats'?"),
        ("+num_repeats=often", "num_repeats: input should be a valid integer"),
        ("+num_repeats_add_seed=true", "num_repeats_add_seed has no counterpart here; leave it out, and"),
        ("+input_jsonl_fpath=none.jsonl", "there is no file none.jsonl"),
    ],
)
def test_what_is_asked_wrongly_is_said_in_a_sentence(started: Place, words: str, said: str) -> None:
    ended = started.run(started.at_head(f"{COLLECT.replace('out/', 'no/')} {words}"))
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert said in ended.err
    assert not (started.folder / "no").exists()


def test_files_that_no_run_of_ours_has_written_are_not_replaced(started: Place) -> None:
    (started.folder / "theirs.jsonl").write_text("precious\n")
    ended = started.run(started.at_head(COLLECT.replace("out/out", "theirs")))
    assert (ended.code, (started.folder / "theirs.jsonl").read_text()) == (2, "precious\n")
    assert "theirs.jsonl would be replaced" in ended.err


@tries(7, 9)
def test_the_head_lists_the_servers_with_the_fields_of_nemo_gym_s_example(started: Place) -> None:
    found = {each["process_name"]: each for each in json.loads(started.run(theirs(7)).out)}
    one = found["example_single_tool_call"]
    assert {key: one[key] for key in ("server_type", "name", "host", "status")} == {
        "server_type": "resources_servers",
        "name": "example_single_tool_call",
        "host": "127.0.0.1",
        "status": "success",
    }
    assert set(TABLE[9].theirs) <= set(one)
    assert set(found) >= {AGENT, "policy_model"}


@tries(8, 40)
def test_the_head_tells_a_configuration_without_a_key(started: Place) -> None:
    told = started.run(theirs(8)).out
    assert "sk-your-openai-key" not in told
    assert AGENT in config(started.head)
    for route in TABLE[40].ours:
        assert httpx.get(started.head + route).status_code == 200
    shown = started.run(f'gymsdk config "{theirs(1).split(chr(34))[1]}"')
    assert (shown.code, re.search(r'policy_api_key: "\*\*\*" +# env.yaml:1', shown.out) is not None) == (0, True)


@tries(15)
def test_the_status_is_told_by_either_command(started: Place) -> None:
    ended = started.run(f"{theirs(15)} +head_server.port=11000")
    assert (ended.code, "4 of 4 expected servers registered" in ended.out) == (0, True)
    assert started.run(f"{ours(15)} --head {started.head}").out.splitlines()[-1] == ended.out.splitlines()[-1]
    told = json.loads(started.run("ng_status +head_server.port=11000 +json=true").out)
    assert told["ok"]


@tries(15)
def test_no_head_is_a_failure_in_a_sentence(place: Place) -> None:
    ended = place.run("ng_status +head_server.port=11000")
    assert (ended.code, ended.out) == (1, "")
    assert ended.err.startswith("Error: ")


@tries(16)
def test_the_thresholds_are_known_to_the_status(started: Place) -> None:
    told = json.loads(started.run(f"{ours(7, 0)} --head {started.head}").out)
    assert {"expected", "registered"} <= set(told)
    assert {"exit_code", "gpus", "round_trip", "wrong"} <= set(told["servers"][0])
    # How long a command takes to come up is the machine's affair.
    watched = (started.run(f"timeout -s INT {seconds} {ours(16, 1)} --head {started.head}") for seconds in (3, 10, 40))
    assert any("4 of 4" in ended.out for ended in watched)


@tries(10)
async def test_servers_ask_each_other_by_name(started: Place) -> None:
    client = ServerClient(started.head)
    row = json.loads((started.folder / "rows.jsonl").read_text().splitlines()[0])
    played = (await client.post(server_name=AGENT, url_path="/run", json=row)).json()
    payload = row | {"response": played["response"]}
    answer = await client.post(server_name="example_single_tool_call", url_path="/verify", json=payload)
    assert answer.json()["reward"] == 1.0
    assert theirs(10).removeprefix("await self.server_client.") == ours(10).removeprefix("await ServerClient(head).")


@tries(37, 38, 39)
async def test_the_routes_of_each_kind_of_server_are_there(started: Place) -> None:
    names = {37: "example_single_tool_call", 38: "policy_model", 39: AGENT}
    urls = await ServerClient(started.head).servers()
    async with httpx.AsyncClient() as client:
        for number, name in names.items():
            paths = (await client.get(f"{urls[name]}/openapi.json")).json()["paths"]
            wanted = [each.removeprefix("POST ") for each in TABLE[number].theirs]
            assert [path for path in wanted if "post" not in paths[path]] == []


@tries(1)
def test_gymsdk_s_own_words_serve_the_same_model(place: Place) -> None:
    rows(place, "tool_call", 1)
    row = json.loads((place.folder / "rows.jsonl").read_text())
    with place.serving(place.at_head(ours(1))) as server:
        answer = httpx.post(f"{server.url('tool_call_simple_agent')}/run", json=row, timeout=30)
    assert answer.json()["reward"] == 1.0


@tries(2, 31, 33, 47)
def test_the_files_are_named_in_a_variable_and_ray_is_not_started(place: Place) -> None:
    with place.serving(place.at_head(LONG + theirs(2)), RAY_ADDRESS="ray://nowhere:10001") as server:
        assert set(config(place.head)) >= {"example_single_tool_call", AGENT, "policy_model"}
    assert "ray" not in (server.said + "".join(server.err)).lower()


@tries(2)
def test_each_server_is_a_process_of_its_own_where_that_is_asked_for(place: Place) -> None:
    paths = LONG.split('"')[1].replace("\\\n", "").split(",")
    place.write("a.yaml", f"config_paths: [{paths[0]}]\n")
    place.write("b.yaml", f"config_paths: [{paths[1]}]\n")
    with place.serving(place.at_head(ours(2))):
        found = httpx.get(f"{place.head}/server_instances").json()
    assert len({each["pid"] for each in found}) == len(found) == 4


@tries(11)
def test_the_head_s_port_is_11000_and_every_other_is_any_that_is_free(place: Place) -> None:
    place.write("none.yaml", "default_host: 127.0.0.1\n")
    shown = place.run("gymsdk config --config none.yaml")
    assert re.search(r"port: (\d+) +# default", shown.out)[1] == "11000"
    low = free()
    with place.serving(place.at_head(f"{ours(1)} --server-port tool_call={low}")) as server:
        assert server.url("tool_call") == f"http://127.0.0.1:{low}"
        assert server.url("head") == place.head


@pytest.mark.skipif(not (ROOT / "compat").is_dir(), reason="the sources are not in reach of tests of the wheels")
@tries(18)
def test_an_installation_from_a_checkout_is_readme_s_first_command() -> None:
    assert theirs(18, 1) == 'pip install -e ".[dev]"'
    assert '.venv/bin/pip install -e ".[dev]"' in (ROOT / "README.md").read_text()
    assert "command_of 'Run it'" in (ROOT / ".ci" / "run").read_text()


def until_one(place: Place, command: str) -> str:
    """Give what *command* says of trouble, which is stopped as soon as one rollout is there."""
    words = ["bash", "-c", f"exec {place.here(command)}"]
    with subprocess.Popen(words, cwd=place.folder, env=place.variables, stderr=subprocess.PIPE, text=True) as process:
        out, until = place.folder / "out.jsonl", time.monotonic() + 60
        while not (out.exists() and out.read_text()):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=30)[1]


def test_a_collection_that_is_stopped_leaves_what_it_has_and_goes_on(place: Place) -> None:
    place.write("script.jsonl", '{"text": "I do not know."}\n')
    rows(place, "tool_call", 4)
    with place.serving("gymsdk policy serve script:script.jsonl --port 0 --latency 0.4") as engine:
        place.engine = engine.url("policy")
        with place.serving(place.at_head(ours(1))):
            words = "+agent_name=tool_call_simple_agent +input_jsonl_fpath=rows.jsonl +output_jsonl_fpath=out.jsonl"
            command = place.at_head(f"ng_collect_rollouts {words} +num_samples_in_parallel=1")
            stopped = until_one(place, command)
            have = len(lines(place.folder / "out.jsonl"))
            ended = place.run(f"{command} +resume_from_cache=true")
    assert stopped.endswith("stopped; the same words with +resume_from_cache=true go on\n"), stopped
    assert 0 < have < 4
    assert (ended.code, len(lines(place.folder / "out.jsonl"))) == (0, 4)
    assert f"{have} of 4 rollouts were finished before" in ended.err


@pytest.mark.parametrize("command", ["ng_run", "ng_status", "ng_collect_rollouts"])
def test_a_command_says_what_it_is(place: Place, command: str) -> None:
    told = place.run(f"{command} --help")
    assert (told.code, told.out.startswith(f"{command} "), "gymsdk" in told.out) == (0, True, True)


def test_nothing_to_run_is_said_in_a_sentence(place: Place) -> None:
    ended = place.run("ng_run")
    assert (ended.code, ended.err.count("\n")) == (2, 1)
    assert '"+config_paths=[config.yaml]"' in ended.err
