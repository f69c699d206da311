"""From laptop to production: secrets, hosts, containers, vLLM, Ray and profiles, as on NeMo Gym's pages."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gymsdk import load
from gymsdk.deploy import vllm_command
from migration.page import ROOT, TABLE, covers, gymsdk_command, nemo_gym_command, page_file
from migration.workspace import KEY, WITHOUT_RAY, Workspace, fetch_config, find_free_port, write_rows

BLOCK = "tool_call:\n  resources_servers:\n    tool_call: {entrypoint: app.py, domain: agent}\n"
HEREDOC = "cat > env.yaml << EOF\npolicy_api_key: sk-your-openai-key\nEOF"
FILES = nemo_gym_command(26).split("[")[1].split("]")[0].split(",")
CONFIG_PATHS = f'config_paths="{FILES[0]},\\\n{FILES[1]}"\n'

VLLM = """\
#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
words = sys.argv[1:]
with open({notes!r}, "w") as file:
    json.dump([words, os.environ.get("HF_HOME")], file)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({{"object": "list", "data": [{{"id": words[1], "object": "model"}}]}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
HTTPServer(("127.0.0.1", int(words[len(words) - 1 - words[::-1].index("--port") + 1])), Handler).serve_forever()
"""
"""A script in place of vLLM that records its arguments and reports that it is healthy."""


@covers(19)
def test_the_key_in_env_yaml_is_the_key_of_the_policy(workspace: Workspace) -> None:
    completed = subprocess.run(["bash", "-c", HEREDOC], cwd=workspace.folder, check=True, timeout=10)
    (workspace.folder / "env.yaml").chmod(0o644)
    shown = workspace.run("gymsdk config policy_model_name=gpt-5")
    assert (completed.returncode, "sk-your" in shown.out + shown.err) == (0, False)
    assert HEREDOC.startswith(nemo_gym_command(19))
    assert f"{nemo_gym_command(19, 1)}\n" == KEY
    assert "chmod 600 env.yaml" in shown.err
    assert gymsdk_command(19) == "GYMSDK_API_KEY"
    from_variable = workspace.run(
        "gymsdk config policy_base_url=http://127.0.0.1:9/v1", GYMSDK_API_KEY="sk-another-key"
    )
    assert "# GYMSDK_API_KEY" in from_variable.out


@covers(20)
def test_an_agent_alone_names_what_it_lacks_and_works_beside_a_resources_server(workspace: Workspace) -> None:
    result = workspace.run(workspace.with_head_port(nemo_gym_command(20)))
    assert (result.code, result.err.count("\n")) == (2, 1), result.err
    assert "resources_server" in result.err
    agent = nemo_gym_command(20).split("[")[1].split("]")[0]
    workspace.write(
        "rest.yaml", BLOCK + "policy_model:\n  responses_api_models:\n    vllm_model: {entrypoint: app.py}\n"
    )
    with workspace.serve(workspace.with_head_port(f'ng_run "+config_paths=[rest.yaml,{agent}]"')) as server:
        row = load("tool_call").tasks("train", seed=0).__next__().row()
        assert httpx.post(f"{server.url('simple_agent')}/run", json=row, timeout=30).json()["reward"] == 1.0


@covers(20)
def test_one_argument_serves_an_environment_with_all_it_needs(workspace: Workspace) -> None:
    with workspace.serve(workspace.with_head_port(gymsdk_command(20))) as server:
        assert httpx.get(server.url("tool_call_simple_agent")).status_code == 200


@covers(17, 21)
@pytest.mark.parametrize("command", [nemo_gym_command(21), gymsdk_command(21)])
def test_serving_on_all_addresses_requires_a_token_or_insecure(workspace: Workspace, command: str) -> None:
    workspace.write("production_config.yaml", BLOCK)
    refused = workspace.run(command)
    assert (refused.code, "token" in refused.err, "insecure" in refused.err) == (2, True, True), refused.err
    token = workspace.write("token.txt", "0123456789abcdef0123456789abcdef\n")
    head = workspace.localize("http://127.0.0.1:8000")
    with workspace.serve(command, GYMSDK_TOKEN_FILE=str(token)):
        assert httpx.get(f"{head}/server_instances").status_code == 401
        status = workspace.run("ng_status +head_server.port=8000", GYMSDK_TOKEN_FILE=str(token))
        assert status.code == 0, status.out + status.err
    with workspace.serve(f"{command} +insecure=true"):
        assert httpx.get(f"{head}/server_instances").status_code == 200


@covers(17)
def test_tls_and_a_token_are_built_in(workspace: Workspace) -> None:
    workspace.write("token.txt", "0123456789abcdef0123456789abcdef\n")
    subject = "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    created = workspace.run(
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout key.pem -out cert.pem {subject}"
    )
    assert created.code == 0, created.err
    with workspace.serve(
        workspace.with_head_port(gymsdk_command(17)), GYMSDK_CA_FILE=str(workspace.folder / "cert.pem")
    ) as server:
        url = server.url("head")
        assert url.startswith("https://")
        arguments = f"ng_status +head_server.port={workspace.ports['11000']} +tls_certificate=cert.pem +tls_key=key.pem"
        status = workspace.run(f"{arguments} +token_file=token.txt", GYMSDK_CA_FILE=str(workspace.folder / "cert.pem"))
    assert status.code == 0, status.out + status.err


@covers(22)
def test_the_command_of_the_container_runs_where_the_package_is_installed(workspace: Workspace) -> None:
    workspace.write("config.yaml", BLOCK)
    arguments = re.findall(r'ng_run "([^"]+)"', TABLE[22].nemo_gym[-1])
    with workspace.serve(workspace.with_head_port(shlex.join(["ng_run", *arguments]))):
        assert "tool_call" in fetch_config(workspace.head)
    assert (TABLE[22].nemo_gym[1], sys.version_info >= (3, 11)) == ("python:3.10", True)


def read_vllm_arguments(workspace: Workspace, command: str, **variables: str) -> tuple[list[str], str | None]:
    """Return the arguments and `HF_HOME` with which *command* starts vLLM."""
    notes, vllm = workspace.folder / "notes.json", workspace.folder / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(VLLM.format(python=sys.executable, notes=str(notes)))
    vllm.chmod(0o755)
    path = f"{vllm.parent}:{workspace.variables['PATH']}"
    before, dashes, parse_flags = command.partition(" -- ")
    with workspace.serve(f"{workspace.with_head_port(before)}{dashes}{parse_flags}", PATH=path, **variables):
        arguments, home = json.loads(notes.read_text())
    return arguments, home


def parse_flags(arguments: list[str]) -> dict[str, str]:
    """Return each flag with its last value, which is the value that vLLM uses."""
    found: dict[str, str] = {}
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


@covers(24, 25, 28)
def test_vllm_is_started_with_the_flags_of_the_page(workspace: Workspace) -> None:
    command = (
        gymsdk_command(25)
        .replace("--port 10240", f"--port {find_free_port()}")
        .replace("serve ", f"serve --port {find_free_port()} ", 1)
    )
    arguments, home = read_vllm_arguments(workspace, command, HF_HOME=".cache/")
    expected, found = parse_flags(shlex.split(nemo_gym_command(25))), parse_flags(arguments)
    assert arguments[:2] == ["serve", "Qwen/Qwen3-30B-A3B"]
    for flag in set(expected) - {"--host", "--port"}:
        assert found.get(flag) == expected[flag], flag
    assert found["--host"] == "127.0.0.1"
    assert home == ".cache/"
    assert "HF_HOME=.cache/" in nemo_gym_command(24)


@covers(28)
def test_the_tool_call_parser_is_chosen_by_model_family() -> None:
    assert vllm_command.find_family("Qwen/Qwen3-30B-A3B").parser == nemo_gym_command(28).split()[1] == "hermes"


@covers(23)
@pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="the sources are not in reach of tests of the wheels"
)
def test_vllm_is_an_extra_of_gymsdk() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith("vllm") for requirement in extras["vllm"])
    assert gymsdk_command(23) == "pip install 'gymsdk[vllm]'"
    assert nemo_gym_command(23) == "uv venv --python 3.12 --seed"


@pytest.fixture
def needle_workspace(tmp_path: Path, needles: str) -> Workspace:
    """Return a workspace with a model that plays `multineedle`."""
    workspace = Workspace(tmp_path, needles)
    workspace.write("env.yaml", f"{KEY}policy_base_url: {needles}\npolicy_model_name: policy\n")
    return workspace


def play_first_task(workspace: Workspace, url: str) -> object:
    row = load("multineedle").tasks("train", seed=0).__next__().row()
    return httpx.post(f"{url}/run", json=row, timeout=60).json().get("reward")


@covers(26)
@pytest.mark.parametrize("command", [nemo_gym_command(26), gymsdk_command(26)])
def test_the_vllm_configuration_can_replace_the_openai_one(needle_workspace: Workspace, command: str) -> None:
    with needle_workspace.serve(needle_workspace.with_head_port(command)) as server:
        assert play_first_task(needle_workspace, server.url("multineedle_simple_agent")) == 1.0


@covers(29, 30)
def test_address_and_model_name_come_from_arguments_or_a_local_copy_of_the_file(needle_workspace: Workspace) -> None:
    with needle_workspace.serve(CONFIG_PATHS + needle_workspace.with_head_port(nemo_gym_command(29))) as server:
        assert play_first_task(needle_workspace, server.url("multineedle_simple_agent")) == 1.0
    needle_workspace.write("env.yaml", KEY)
    text = "policy_model: {{responses_api_models: {{vllm_model: {{base_url: {}, model: edited, api_key: none}}}}}}\n"
    needle_workspace.write(nemo_gym_command(30), text.format(needle_workspace.engine))
    with needle_workspace.serve(CONFIG_PATHS + needle_workspace.with_head_port(nemo_gym_command(2))) as server:
        assert "Ready: edited plays" in server.out
        assert play_first_task(needle_workspace, server.url("multineedle_simple_agent")) == 1.0


@covers(29)
def test_gymsdk_options_set_address_and_model_name(needle_workspace: Workspace) -> None:
    with needle_workspace.serve(needle_workspace.with_head_port(gymsdk_command(29))) as server:
        assert play_first_task(needle_workspace, server.url("multineedle_simple_agent")) == 1.0


@covers(27)
@pytest.mark.parametrize("reasoning", ["field", "tags"])
def test_reasoning_is_returned_whether_or_not_vllm_parses_it(workspace: Workspace, reasoning: str) -> None:
    workspace.write("script.jsonl", '{"reasoning": "Let me see.", "text": "42"}\n')
    with workspace.serve(f"gymsdk policy serve script:script.jsonl --port 0 --reasoning {reasoning}") as engine:
        workspace.engine = engine.url("policy")
        with workspace.serve(workspace.with_head_port(gymsdk_command(26).replace("multineedle", "math"))) as server:
            request = {"input": [{"role": "user", "content": "What is 40 + 2?"}]}
            items = httpx.post(f"{server.url('policy_model')}/v1/responses", json=request).json()["output"]
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert items[1]["content"][0]["text"] == "42"


@covers(32)
@WITHOUT_RAY
def test_without_ray_an_address_is_reported_once_and_not_used(workspace: Workspace) -> None:
    workspace.write("config.yaml", nemo_gym_command(32) + "\n" + BLOCK)
    for command in (nemo_gym_command(32, 1), gymsdk_command(32)):
        with workspace.serve(workspace.with_head_port(command)) as server:
            assert "tool_call" in fetch_config(workspace.head)
        assert sum("ray_head_node_address" in line for line in server.err) == 1
        assert "ray" not in server.out.lower()


@covers(32)
@WITHOUT_RAY
def test_a_configuration_with_only_a_ray_address_starts_a_head_that_servers_can_join(workspace: Workspace) -> None:
    workspace.write("config.yaml", nemo_gym_command(32) + "\n")
    workspace.write("worker.yaml", f"head_server: {{host: 127.0.0.1, port: {workspace.ports['11000']}}}\n{BLOCK}")
    with workspace.serve(workspace.with_head_port(nemo_gym_command(32, 1))) as server:
        assert server.url("head") == workspace.head
        assert httpx.get(f"{workspace.head}/server_instances").json() == []
        with workspace.serve("gymsdk serve --config worker.yaml --model scripted/oracle"):
            assert "tool_call" in fetch_config(workspace.head)


@covers(34)
def test_the_offload_snippet_that_replaces_ray_grades_answers(
    workspace: Workspace, installed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = installed("graded", page_file("gym_env_graded.py"))
    arguments = "gymsdk rollout graded --model scripted/"
    result = {
        who: workspace.run(f"{arguments}{who} --output {who}", PYTHONPATH=str(site)) for who in ("oracle", "null")
    }
    assert [run.code for run in result.values()] == [0, 0], result["oracle"].err
    means = [
        json.loads((workspace.folder / who / "metrics.json").read_text())[0]["agent_metrics"]["mean/reward"]
        for who in result
    ]
    assert means == [1.0, 0.0]
    assert gymsdk_command(34) in page_file("gym_env_graded.py")
    assert ast.parse(page_file("gym_env_graded.py"))


@covers(35)
def test_the_math_server_of_nemo_gym_maps_to_the_math_environment(workspace: Workspace) -> None:
    workspace.write(
        "config.yaml", "config_paths: [resources_servers/library_judge_math/configs/library_judge_math.yaml]\n"
    )
    row = load("math").tasks("train", seed=0).__next__().row()
    reply = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "no idea"}]}
    with workspace.serve(
        workspace.with_head_port(
            'ng_run "+config_paths=[config.yaml,responses_api_models/vllm_model/configs/vllm_model.yaml]"'
        )
    ) as server:
        request = row | {"response": {"output": [reply]}}
        assert (
            httpx.post(f"{server.url('library_judge_math')}/verify", json=request, timeout=30).json()["reward"] == 0.0
        )
    assert (nemo_gym_command(35), gymsdk_command(35)) == ("library_judge_math", "math")


@covers(41)
def test_a_profile_is_served_at_stats(workspace: Workspace) -> None:
    workspace.write("config.yaml", BLOCK + f"{nemo_gym_command(41)}: true\nprofiling_results_dirpath: profiles\n")
    with workspace.serve(workspace.with_head_port('ng_run "+config_paths=[config.yaml]"')) as server:
        httpx.post(
            f"{server.url('tool_call')}/seed_session", json=load("tool_call").tasks("train", seed=0).__next__().row()
        )
        found = httpx.get(f"{server.url('tool_call')}/stats")
        assert (found.status_code, bool(found.json())) == (200, True)
    assert any((workspace.folder / "profiles").iterdir())


@covers(42)
def test_later_files_override_earlier_ones_then_env_yaml_then_the_command_line(workspace: Workspace) -> None:
    workspace.write("a.yaml", "default_host: 127.0.0.2\nlog_level: debug\nadvertise_host: a\n")
    workspace.write("b.yaml", "config_paths: [a.yaml]\ndefault_host: 127.0.0.3\n")
    workspace.write(".env.yaml", "log_level: error\n")
    shown = workspace.run("gymsdk config config_paths=[b.yaml] advertise_host=c").out
    assert re.findall(r"^(default_host|log_level|advertise_host): (\S+) +# (\S+)", shown, re.MULTILINE) == [
        ("advertise_host", "c", "command"),
        ("default_host", '"127.0.0.3"', "b.yaml:2"),
        ("log_level", "error", ".env.yaml:1"),
    ]
    wrong = workspace.run('gymsdk config "config_paths=[resources_servers/math/configs/math.yaml]"')
    assert "refers to 'policy_model', which is none of the responses_api_models" in wrong.err


@covers(48)
def test_a_trainers_server_is_asked_for_token_ids_and_receives_them_back(workspace: Workspace) -> None:
    write_rows(workspace, "tool_call", 1)
    row = json.loads((workspace.folder / "rows.jsonl").read_text())
    command = gymsdk_command(48).replace("math", "tool_call")
    with workspace.serve(workspace.with_head_port(command)) as server:
        items = httpx.post(f"{server.url('tool_call_simple_agent')}/run", json=row, timeout=30).json()["response"][
            "output"
        ]
    turns = [item for item in items if item.get("generation_token_ids")]
    assert turns
    previous: list[int] = []
    for turn in turns:
        assert turn["prompt_token_ids"][: len(previous)] == previous
        previous = turn["prompt_token_ids"] + turn["generation_token_ids"]
