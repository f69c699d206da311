from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from cli.conftest import Command
from gymsdk import configuration

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
    path = there / "worker.yaml"
    path.write_text(WORKER)
    return path


def test_every_setting_says_where_it_comes_from(gymsdk: Command, worker: Path) -> None:
    ended = gymsdk("config", "--config", "worker.yaml", "head_server.port=8000", "policy_api_key=sk-tell-nobody")
    assert ended.code == 0
    lines = {line.split(":")[0].strip(): line.split("# ")[-1] for line in ended.out.splitlines() if "# " in line}
    assert lines["openai_model"] == "GYMSDK_MODEL"
    assert lines["policy_api_key"] == "command line"
    assert lines["insecure"] == "default"
    assert '  host: "192.168.1.101"' in ended.out
    assert "# worker.yaml:8" in ended.out
    assert "sk-tell-nobody" not in ended.out + ended.err
    assert ended.err == "NeMo Gym's keys that mean nothing here: ray_head_node_address\n"


def test_what_is_shown_is_yaml(gymsdk: Command, worker: Path) -> None:
    read = yaml.safe_load(gymsdk("config", "--config", "worker.yaml").out)
    assert read["head_server"] == {"host": "192.168.1.100", "port": 11000}
    assert read["policy_model"]["responses_api_models"]["openai_model"]["port"] == 8000


def test_as_json_settings_and_places_are_one_object(gymsdk: Command, worker: Path) -> None:
    told = json.loads(gymsdk("config", "+config_paths=[worker.yaml]", "--json").out)
    assert told["settings"]["head_server.host"] == {"value": "192.168.1.100", "from": "worker.yaml:2"}
    assert told["ignored"] == ["ray_head_node_address"]


def test_a_wrong_configuration_is_told_line_by_line(gymsdk: Command, there: Path) -> None:
    (there / "a.yaml").write_text("lo_level: 2\nhed_server: {}\n")
    ended = gymsdk("config", "--config", "a.yaml")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.splitlines()[0] == "Error: a.yaml:1: there is no setting 'lo_level'; did you mean 'log_level'?"
    assert ended.err.splitlines()[1].startswith("a.yaml:2: there is no setting 'hed_server'")


def test_a_starting_file_serves_its_environment(gymsdk: Command, there: Path) -> None:
    (there / "sums.yaml").write_text(gymsdk("config", "sums").out)
    found = configuration.read(["sums.yaml"])
    assert [block.name for block in found.servers] == ["sums", "sums_simple_agent", "policy_model"]
    assert "# digits:" in (there / "sums.yaml").read_text()


def test_a_starting_file_replaces_nothing(gymsdk: Command, there: Path) -> None:
    assert gymsdk("config", "sums", "--output", "a.yaml").out == "Wrote a.yaml: gymsdk serve --config a.yaml\n"
    (there / "a.yaml").write_text("mine")
    ended = gymsdk("config", "sums", "--output", "a.yaml")
    assert (ended.code, (there / "a.yaml").read_text()) == (2, "mine")
    assert ended.err == "Error: a.yaml is there and is not replaced; choose another --output\n"


@pytest.mark.parametrize("words", [("sums", "head_server.port=1"), ("sums", "--config", "a.yaml"), ("smus",)])
def test_a_word_that_is_neither_setting_nor_environment_is_told(gymsdk: Command, words: tuple[str, ...]) -> None:
    ended = gymsdk("config", *words)
    assert (ended.code, ended.out) == (2, "")
    assert words[0] in ended.err
