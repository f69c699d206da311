"""From a laptop to production: secrets, hosts, containers, vLLM, Ray, profiles, as NeMo Gym's pages write them."""

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
from seeds.page import ROOT, TABLE, file, ours, theirs, tries
from seeds.place import KEY, Place, config, free, rows

BLOCK = "tool_call:\n  resources_servers:\n    tool_call: {entrypoint: app.py, domain: agent}\n"
HEREDOC = "cat > env.yaml << EOF\npolicy_api_key: sk-your-openai-key\nEOF"
FILES = theirs(26).split("[")[1].split("]")[0].split(",")
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
"""What stands in for vLLM: it notes how it was started, and is healthy."""


@tries(19)
def test_the_key_of_env_yaml_is_the_policy_s(place: Place) -> None:
    done = subprocess.run(["bash", "-c", HEREDOC], cwd=place.folder, check=True, timeout=10)
    (place.folder / "env.yaml").chmod(0o644)
    shown = place.run("gymsdk config policy_model_name=gpt-5")
    assert (done.returncode, "sk-your" in shown.out + shown.err) == (0, False)
    assert HEREDOC.startswith(theirs(19))
    assert f"{theirs(19, 1)}\n" == KEY
    assert "chmod 600 env.yaml" in shown.err
    assert ours(19) == "GYMSDK_API_KEY"
    from_variable = place.run("gymsdk config policy_base_url=http://127.0.0.1:9/v1", GYMSDK_API_KEY="sk-another-key")
    assert "# GYMSDK_API_KEY" in from_variable.out


@tries(20)
def test_an_agent_alone_says_what_it_lacks_and_beside_a_resources_server_is_that_one_s(place: Place) -> None:
    ended = place.run(place.at_head(theirs(20)))
    assert (ended.code, ended.err.count("\n")) == (2, 1), ended.err
    assert "resources_server" in ended.err
    agent = theirs(20).split("[")[1].split("]")[0]
    place.write("rest.yaml", BLOCK + "policy_model:\n  responses_api_models:\n    vllm_model: {entrypoint: app.py}\n")
    with place.serving(place.at_head(f'ng_run "+config_paths=[rest.yaml,{agent}]"')) as server:
        row = load("tool_call").tasks("train", seed=0).__next__().row()
        assert httpx.post(f"{server.url('simple_agent')}/run", json=row, timeout=30).json()["reward"] == 1.0


@tries(20)
def test_one_environment_with_all_it_needs_takes_one_word(place: Place) -> None:
    with place.serving(place.at_head(ours(20))) as server:
        assert httpx.get(server.url("tool_call_simple_agent")).status_code == 200


@tries(17, 21)
@pytest.mark.parametrize("command", [theirs(21), ours(21)])
def test_all_addresses_are_served_with_a_token_or_insecurely_and_else_not_at_all(place: Place, command: str) -> None:
    place.write("production_config.yaml", BLOCK)
    refused = place.run(command)
    assert (refused.code, "token" in refused.err, "insecure" in refused.err) == (2, True, True), refused.err
    token = place.write("token.txt", "0123456789abcdef0123456789abcdef\n")
    head = place.here("http://127.0.0.1:8000")
    with place.serving(command, GYMSDK_TOKEN_FILE=str(token)):
        assert httpx.get(f"{head}/server_instances").status_code == 401
        asked = place.run("ng_status +head_server.port=8000", GYMSDK_TOKEN_FILE=str(token))
        assert asked.code == 0, asked.out + asked.err
    with place.serving(f"{command} +insecure=true"):
        assert httpx.get(f"{head}/server_instances").status_code == 200


@tries(17)
def test_tls_and_a_token_are_built_in(place: Place) -> None:
    place.write("token.txt", "0123456789abcdef0123456789abcdef\n")
    subject = "-subj /CN=localhost -addext subjectAltName=DNS:localhost,IP:127.0.0.1"
    made = place.run(f"openssl req -x509 -newkey rsa:2048 -nodes -days 1 -keyout key.pem -out cert.pem {subject}")
    assert made.code == 0, made.err
    with place.serving(place.at_head(ours(17)), GYMSDK_CA_FILE=str(place.folder / "cert.pem")) as server:
        url = server.url("head")
        assert url.startswith("https://")
        words = f"ng_status +head_server.port={place.ports['11000']} +tls_certificate=cert.pem +tls_key=key.pem"
        asked = place.run(f"{words} +token_file=token.txt", GYMSDK_CA_FILE=str(place.folder / "cert.pem"))
    assert asked.code == 0, asked.out + asked.err


@tries(22)
def test_the_command_of_a_container_runs_where_the_package_is_installed(place: Place) -> None:
    place.write("config.yaml", BLOCK)
    words = re.findall(r'ng_run "([^"]+)"', TABLE[22].theirs[-1])
    with place.serving(place.at_head(shlex.join(["ng_run", *words]))):
        assert "tool_call" in config(place.head)
    assert (TABLE[22].theirs[1], sys.version_info >= (3, 11)) == ("python:3.10", True)


def launched(place: Place, command: str, **variables: str) -> tuple[list[str], str | None]:
    """Give the words and the folder with which *command* starts vLLM."""
    notes, vllm = place.folder / "notes.json", place.folder / "bin" / "vllm"
    vllm.parent.mkdir()
    vllm.write_text(VLLM.format(python=sys.executable, notes=str(notes)))
    vllm.chmod(0o755)
    path = f"{vllm.parent}:{place.variables['PATH']}"
    before, dashes, flags = command.partition(" -- ")
    with place.serving(f"{place.at_head(before)}{dashes}{flags}", PATH=path, **variables):
        words, home = json.loads(notes.read_text())
    return words, home


def flags(words: list[str]) -> dict[str, str]:
    """Give each flag with its last value: that is the one vLLM takes."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


@tries(24, 25, 28)
def test_vllm_is_started_with_the_flags_of_the_page(place: Place) -> None:
    command = ours(25).replace("--port 10240", f"--port {free()}").replace("serve ", f"serve --port {free()} ", 1)
    words, home = launched(place, command, HF_HOME=".cache/")
    wanted, found = flags(shlex.split(theirs(25))), flags(words)
    assert words[:2] == ["serve", "Qwen/Qwen3-30B-A3B"]
    for flag in set(wanted) - {"--host", "--port"}:
        assert found.get(flag) == wanted[flag], flag
    assert found["--host"] == "127.0.0.1"
    assert home == ".cache/"
    assert "HF_HOME=.cache/" in theirs(24)


@tries(28)
def test_the_parser_of_calls_is_chosen_by_the_family() -> None:
    assert vllm_command.find_family("Qwen/Qwen3-30B-A3B").parser == theirs(28).split()[1] == "hermes"


@tries(23)
@pytest.mark.skipif(
    not (ROOT / "pyproject.toml").exists(), reason="the sources are not in reach of tests of the wheels"
)
def test_vllm_is_an_extra_of_gymsdk() -> None:
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(each.startswith("vllm") for each in extras["vllm"])
    assert ours(23) == "pip install 'gymsdk[vllm]'"
    assert theirs(23) == "uv venv --python 3.12 --seed"


@pytest.fixture
def long(tmp_path: Path, needles: str) -> Place:
    """A place whose model plays `multineedle`."""
    place = Place(tmp_path, needles)
    place.write("env.yaml", f"{KEY}policy_base_url: {needles}\npolicy_model_name: policy\n")
    return place


def played(place: Place, url: str) -> object:
    row = load("multineedle").tasks("train", seed=0).__next__().row()
    return httpx.post(f"{url}/run", json=row, timeout=60).json().get("reward")


@tries(26)
@pytest.mark.parametrize("command", [theirs(26), ours(26)])
def test_vllm_s_configuration_takes_the_place_of_openai_s(long: Place, command: str) -> None:
    with long.serving(long.at_head(command)) as server:
        assert played(long, server.url("multineedle_simple_agent")) == 1.0


@tries(29, 30)
def test_address_and_name_are_given_by_word_or_by_a_file_of_the_same_path(long: Place) -> None:
    with long.serving(CONFIG_PATHS + long.at_head(theirs(29))) as server:
        assert played(long, server.url("multineedle_simple_agent")) == 1.0
    long.write("env.yaml", KEY)
    text = "policy_model: {{responses_api_models: {{vllm_model: {{base_url: {}, model: edited, api_key: none}}}}}}\n"
    long.write(theirs(30), text.format(long.engine))
    with long.serving(CONFIG_PATHS + long.at_head(theirs(2))) as server:
        assert "Ready: edited plays" in server.said
        assert played(long, server.url("multineedle_simple_agent")) == 1.0


@tries(29)
def test_gymsdk_s_own_words_name_them_too(long: Place) -> None:
    with long.serving(long.at_head(ours(29))) as server:
        assert played(long, server.url("multineedle_simple_agent")) == 1.0


@tries(27)
@pytest.mark.parametrize("reasoning", ["field", "tags"])
def test_thoughts_come_back_whether_vllm_parses_them_or_not(place: Place, reasoning: str) -> None:
    place.write("script.jsonl", '{"reasoning": "Let me see.", "text": "42"}\n')
    with place.serving(f"gymsdk policy serve script:script.jsonl --port 0 --reasoning {reasoning}") as engine:
        place.engine = engine.url("policy")
        with place.serving(place.at_head(ours(26).replace("multineedle", "math"))) as server:
            asked = {"input": [{"role": "user", "content": "What is 40 + 2?"}]}
            items = httpx.post(f"{server.url('policy_model')}/v1/responses", json=asked).json()["output"]
    assert [each["type"] for each in items] == ["reasoning", "message"]
    assert items[1]["content"][0]["text"] == "42"


@tries(31, 32)
def test_ray_s_address_is_accepted_reported_once_and_not_used(place: Place) -> None:
    place.write("config.yaml", theirs(32) + "\n" + BLOCK)
    for command in (theirs(32, 1), ours(32)):
        with place.serving(place.at_head(command)) as server:
            assert "tool_call" in config(place.head)
        assert sum("ray_head_node_address" in line for line in server.err) == 1
        assert "ray" not in server.said.lower()


@tries(32)
def test_ray_s_address_alone_starts_a_head_that_servers_join(place: Place) -> None:
    place.write("config.yaml", theirs(32) + "\n")
    place.write("worker.yaml", f"head_server: {{host: 127.0.0.1, port: {place.ports['11000']}}}\n{BLOCK}")
    with place.serving(place.at_head(theirs(32, 1))) as server:
        assert server.url("head") == place.head
        assert httpx.get(f"{place.head}/server_instances").json() == []
        with place.serving("gymsdk serve --config worker.yaml --model scripted/oracle"):
            assert "tool_call" in config(place.head)


@tries(34)
def test_the_snippet_that_stands_in_ray_s_place_grades(
    place: Place, installed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site = installed("graded", file("gym_env_graded.py"))
    words = "gymsdk rollout graded --model scripted/"
    ended = {who: place.run(f"{words}{who} --output {who}", PYTHONPATH=str(site)) for who in ("oracle", "null")}
    assert [each.code for each in ended.values()] == [0, 0], ended["oracle"].err
    means = [
        json.loads((place.folder / who / "metrics.json").read_text())[0]["agent_metrics"]["mean/reward"]
        for who in ended
    ]
    assert means == [1.0, 0.0]
    assert ours(34) in file("gym_env_graded.py")
    assert ast.parse(file("gym_env_graded.py"))


@tries(35)
def test_nemo_gym_s_math_server_is_ours(place: Place) -> None:
    place.write("config.yaml", "config_paths: [resources_servers/library_judge_math/configs/library_judge_math.yaml]\n")
    row = load("math").tasks("train", seed=0).__next__().row()
    reply = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "no idea"}]}
    with place.serving(
        place.at_head('ng_run "+config_paths=[config.yaml,responses_api_models/vllm_model/configs/vllm_model.yaml]"')
    ) as server:
        asked = row | {"response": {"output": [reply]}}
        assert httpx.post(f"{server.url('library_judge_math')}/verify", json=asked, timeout=30).json()["reward"] == 0.0
    assert (theirs(35), ours(35)) == ("library_judge_math", "math")


@tries(41)
def test_a_profile_is_told_at_stats(place: Place) -> None:
    place.write("config.yaml", BLOCK + f"{theirs(41)}: true\nprofiling_results_dirpath: profiles\n")
    with place.serving(place.at_head('ng_run "+config_paths=[config.yaml]"')) as server:
        httpx.post(
            f"{server.url('tool_call')}/seed_session", json=load("tool_call").tasks("train", seed=0).__next__().row()
        )
        found = httpx.get(f"{server.url('tool_call')}/stats")
        assert (found.status_code, bool(found.json())) == (200, True)
    assert any((place.folder / "profiles").iterdir())


@tries(42)
def test_later_files_win_then_env_yaml_then_the_command_line(place: Place) -> None:
    place.write("a.yaml", "default_host: 127.0.0.2\nlog_level: debug\nadvertise_host: a\n")
    place.write("b.yaml", "config_paths: [a.yaml]\ndefault_host: 127.0.0.3\n")
    place.write(".env.yaml", "log_level: error\n")
    shown = place.run("gymsdk config config_paths=[b.yaml] advertise_host=c").out
    assert re.findall(r"^(default_host|log_level|advertise_host): (\S+) +# (\S+)", shown, re.MULTILINE) == [
        ("advertise_host", "c", "command"),
        ("default_host", '"127.0.0.3"', "b.yaml:2"),
        ("log_level", "error", ".env.yaml:1"),
    ]
    wrong = place.run('gymsdk config "config_paths=[resources_servers/math/configs/math.yaml]"')
    assert "refers to 'policy_model', which is none of the responses_api_models" in wrong.err


@tries(48)
def test_a_trainer_s_server_is_asked_for_token_ids_and_given_them_back(place: Place) -> None:
    rows(place, "tool_call", 1)
    row = json.loads((place.folder / "rows.jsonl").read_text())
    command = ours(48).replace("math", "tool_call")
    with place.serving(place.at_head(command)) as server:
        items = httpx.post(f"{server.url('tool_call_simple_agent')}/run", json=row, timeout=30).json()["response"][
            "output"
        ]
    turns = [each for each in items if each.get("generation_token_ids")]
    assert turns
    seen: list[int] = []
    for each in turns:
        assert each["prompt_token_ids"][: len(seen)] == seen
        seen = each["prompt_token_ids"] + each["generation_token_ids"]
