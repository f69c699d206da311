from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cli.conftest import Command
from gymsdk import config

WORKER = """\
head_server:
  host: 192.168.1.100
  port: 11000
policy_model:
  responses_api_models:
    openai_model:
      entrypoint: app.py
      host: 192.168.1.101
      port: 8000
ray_head_node_address: ray://cluster:10001
"""


@pytest.fixture
def worker(there: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("GYMSDK_API_KEY", "GYMSDK_MODEL", "GYMSDK_TOKEN_FILE", "GYMSDK_INSECURE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("GYMSDK_MODEL", "gpt-5")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-nobody")
    path = there / "worker.yaml"
    path.write_text(WORKER)
    return path


def test_every_setting_has_its_origin(gymsdk: Command, worker: Path) -> None:
    ended = gymsdk("config", "--config", "worker.yaml", "head_server.port=8000", "policy_api_key=sk-tell-nobody")
    assert ended.code == 0
    lines = {line.split(":")[0].strip(): line.split("# ")[-1] for line in ended.out.splitlines() if "# " in line}
    assert lines["openai_model"] == "GYMSDK_MODEL"
    assert lines["policy_api_key"] == "command line"
    assert lines["insecure"] == "default"
    assert '  host: "192.168.1.101"' in ended.out
    assert "# worker.yaml:8" in ended.out
    assert "sk-tell-nobody" not in ended.out + ended.err
    ignored, exposed = ended.err.splitlines()
    assert ignored == "NeMo Gym's keys that mean nothing here: ray_head_node_address (worker.yaml:10)"
    assert exposed == (
        "policy_api_key is on the command line, which everybody on this machine can read;"
        " put it into GYMSDK_API_KEY, or env.yaml"
    )


def test_settings_are_printed_as_yaml(gymsdk: Command, worker: Path) -> None:
    read = yaml.safe_load(gymsdk("config", "--config", "worker.yaml").out)
    assert read["head_server"] == {"host": "192.168.1.100", "port": 11000}
    assert read["policy_model"]["responses_api_models"]["openai_model"]["port"] == 8000


def test_json_contains_settings_and_origins(gymsdk: Command, worker: Path) -> None:
    told = json.loads(gymsdk("config", "+config_paths=[worker.yaml]", "--json").out)
    assert told["settings"]["head_server.host"] == {"value": "192.168.1.100", "from": "worker.yaml:2"}
    assert told["ignored"] == ["ray_head_node_address"]


def test_a_wrong_configuration_is_reported_line_by_line(gymsdk: Command, there: Path) -> None:
    (there / "a.yaml").write_text("lo_level: 2\nhed_server: {}\n")
    ended = gymsdk("config", "--config", "a.yaml")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[0] == "Error: a.yaml:1: there is no setting 'lo_level'; did you mean 'log_level'?"
    assert ended.err.splitlines()[1].startswith("a.yaml:2: there is no setting 'hed_server'")


def test_a_starting_file_serves_its_environment(gymsdk: Command, there: Path) -> None:
    (there / "sums.yaml").write_text(gymsdk("config", "sums").out)
    found = config.load_config(["sums.yaml"])
    assert [block.name for block in found.servers] == ["sums", "sums_simple_agent", "policy_model"]
    assert "# digits:" in (there / "sums.yaml").read_text()


def test_a_starting_file_replaces_nothing(gymsdk: Command, there: Path) -> None:
    assert gymsdk("config", "sums", "--output", "a.yaml").out == "Wrote a.yaml: gymsdk serve --config a.yaml\n"
    (there / "a.yaml").write_text("mine")
    ended = gymsdk("config", "sums", "--output", "a.yaml")
    assert (ended.code, (there / "a.yaml").read_text()) == (2, "mine")
    assert ended.err == "Error: a.yaml already exists; choose another --output\n"


def test_a_setting_that_is_mistyped_is_blamed_and_not_the_environment(gymsdk: Command) -> None:
    ended = gymsdk("config", "sums", "log_levl=info")
    assert ended.err == "Error: command line: there is no setting 'log_levl'; did you mean 'log_level'?\n"
    assert ended.code == 2


def test_a_file_without_config_gets_a_hint(gymsdk: Command) -> None:
    for command in ("config", "serve"):
        ended = gymsdk(command, "a.yaml")
        assert (ended.code, ended.err) == (2, "Error: 'a.yaml' is a file; give it with --config a.yaml\n")


MISFIT = """\
sums:
  resources_servers:
    sums:
      digits: many
      digts: 2
other:
  resources_servers:
    smus:
      digits: 2
policy_model:
  responses_api_models:
    gymsdk_model:
      entrypoint: app.py
      model: scripted/orakel
"""
WRONG = [
    "sums.yaml:5: sums.resources_servers.sums.digts: no setting of environment 'sums'; did you mean 'digits'?",
    "sums.yaml:8: other: no environment named 'smus' is installed; did you mean 'sums'?",
    "sums.yaml:14: policy_model.responses_api_models.gymsdk_model.model: no scripted policy named 'orakel'; did",
]


@pytest.mark.parametrize("words", [("config",), ("serve", "--port", 0), ("serve", "--port", 0, "--separate")])
def test_invalid_settings_are_reported_with_their_line(gymsdk: Command, there: Path, words: tuple[object, ...]) -> None:
    (there / "sums.yaml").write_text(MISFIT)
    ended = gymsdk(*words, "--config", "sums.yaml")
    assert ended.code == 2
    told = sorted(ended.err.removeprefix("Error: ").replace("\nError: ", "\n").splitlines())
    for line in WRONG:
        assert any(each.startswith(line) for each in told), told
    (there / "sums.yaml").write_text(MISFIT.replace("      digts: 2\n", ""))
    assert (
        "sums.yaml:4: sums.resources_servers.sums.digits: input should be a valid integer"
        in gymsdk(*words, "--config", "sums.yaml").err
    )


def test_a_wrong_secret_setting_is_redacted(gymsdk: Command, there: Path) -> None:
    (there / "a.yaml").write_text("sums:\n  resources_servers:\n    sums:\n      key: [sk-12345678]\n")
    ended = gymsdk("config", "--config", "a.yaml")
    assert "a.yaml:4: sums.resources_servers.sums.key: input should be a valid string" in ended.err
    assert "sk-12345678" not in ended.out + ended.err
    assert "sk-12345678" not in gymsdk("serve", "sums", "--set", 'key=["sk-12345678"]').err


def test_a_node_validates_only_the_environments_it_serves(gymsdk: Command, there: Path) -> None:
    (there / "a.yaml").write_text(MISFIT.replace("scripted/orakel", "scripted/null"))
    ended = gymsdk("serve", "--config", "a.yaml", "--role", "model", "--host", "203.0.113.7", "--insecure")
    assert "203.0.113.7 is no address of this machine" in ended.err


def test_a_file_without_servers_is_not_served(gymsdk: Command, there: Path) -> None:
    (there / "a.yaml").write_text("")
    ended = gymsdk("serve", "--config", "a.yaml")
    assert ended.code == 2
    assert ended.err == "Error: a.yaml names no server; `gymsdk config NAME` writes a file that serves an environment\n"


@pytest.mark.parametrize("words", [("sums", "head_server.port=1"), ("sums", "--config", "a.yaml"), ("smus",)])
def test_a_word_that_is_neither_setting_nor_environment_is_rejected(gymsdk: Command, words: tuple[str, ...]) -> None:
    ended = gymsdk("config", *words)
    assert (ended.code, ended.out) == (2, "")
    assert words[0] in ended.err
