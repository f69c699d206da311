from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from sums_environment import SUMS

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
skip_venv_if_present: true
"""


@pytest.fixture
def worker(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for variable in ("GYMSDK_API_KEY", "GYMSDK_MODEL", "GYMSDK_TOKEN_FILE", "GYMSDK_INSECURE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("GYMSDK_MODEL", "gpt-5")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-nobody")
    path = workdir / "worker.yaml"
    path.write_text(WORKER)
    return path


def test_every_setting_has_its_origin(gymsdk: Command, worker: Path) -> None:
    result = gymsdk("config", "--config", "worker.yaml", "head_server.port=8000", "policy_api_key=sk-tell-nobody")
    assert result.code == 0
    lines = {line.split(":")[0].strip(): line.split("# ")[-1] for line in result.out.splitlines() if "# " in line}
    assert lines["openai_model"] == "GYMSDK_MODEL"
    assert lines["policy_api_key"] == "command line"
    assert lines["insecure"] == "default"
    assert '  host: "192.168.1.101"' in result.out
    assert "# worker.yaml:8" in result.out
    assert "sk-tell-nobody" not in result.out + result.err
    ignored, exposed = result.err.splitlines()
    assert ignored == "gymsdk ignores these keys of NeMo Gym: skip_venv_if_present (worker.yaml:10)"
    assert exposed == (
        "policy_api_key is on the command line, which all users of this machine can read;"
        " put it into GYMSDK_API_KEY, or env.yaml"
    )


def test_settings_are_printed_as_yaml_and_as_json_with_their_origins(gymsdk: Command, worker: Path) -> None:
    settings = yaml.safe_load(gymsdk("config", "--config", "worker.yaml").out)
    assert settings["head_server"] == {"host": "192.168.1.100", "port": 11000}
    assert settings["policy_model"]["responses_api_models"]["openai_model"]["port"] == 8000
    output = json.loads(gymsdk("config", "+config_paths=[worker.yaml]", "--json").out)
    assert output["settings"]["head_server.host"] == {"value": "192.168.1.100", "from": "worker.yaml:2"}
    assert output["ignored"] == ["skip_venv_if_present"]


def test_a_starting_file_serves_its_environment_and_replaces_nothing(gymsdk: Command, workdir: Path) -> None:
    assert gymsdk("config", "sums", "--output", "a.yaml").out == "Wrote a.yaml: gymsdk serve --config a.yaml\n"
    found = config.load_config(["a.yaml"])
    assert [block.name for block in found.servers] == ["sums", "sums_simple_agent", "policy_model"]
    assert "# digits:" in (workdir / "a.yaml").read_text()
    (workdir / "a.yaml").write_text("mine")
    result = gymsdk("config", "sums", "--output", "a.yaml")
    assert (result.code, (workdir / "a.yaml").read_text()) == (2, "mine")
    assert result.err == "Error: a.yaml already exists; choose another --output\n"


INVALID = """\
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
ERRORS = [
    "sums.yaml:5: sums.resources_servers.sums.digts: no setting of environment 'sums'; did you mean 'digits'?",
    "sums.yaml:8: other: no environment named 'smus' is installed; did you mean 'sums'?",
    "sums.yaml:14: policy_model.responses_api_models.gymsdk_model.model: no scripted policy named 'orakel'; did",
]


@pytest.mark.parametrize("arguments", [("config",), ("serve", "--port", 0), ("serve", "--port", 0, "--separate")])
def test_invalid_settings_are_reported_with_their_line(
    gymsdk: Command, workdir: Path, arguments: tuple[object, ...]
) -> None:
    (workdir / "sums.yaml").write_text(INVALID)
    result = gymsdk(*arguments, "--config", "sums.yaml")
    assert result.code == 2
    lines = sorted(result.err.removeprefix("Error: ").replace("\nError: ", "\n").splitlines())
    for line in ERRORS:
        assert any(printed.startswith(line) for printed in lines), lines
    (workdir / "sums.yaml").write_text(INVALID.replace("      digts: 2\n", ""))
    assert (
        "sums.yaml:4: sums.resources_servers.sums.digits: input should be a valid integer"
        in gymsdk(*arguments, "--config", "sums.yaml").err
    )


JUDGED = SUMS.replace("import Claims,", "import Claims, Model,").replace(
    "class Settings(Config):\n", "class Settings(Config):\n    needed: int\n    judge: Model | None = None\n"
)
JUDGED_FILE = """\
judged:
  resources_servers:
    judged:
      judge: nonsense
      digits: ${oc.env:LEVEL}
      notes: ${oc.env:LEVEL}
      pause: [77]
      needed: twenty-five
      breaks: 5
      extra: 5
      key: plain
"""


def test_every_wrong_setting_of_an_environment_is_reported_and_shown_unless_it_may_be_secret(
    installed: Callable[..., Path], gymsdk: Command, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed("judged", JUDGED)
    monkeypatch.setenv("LEVEL", "many")
    (workdir / "a.yaml").write_text(JUDGED_FILE)
    result = gymsdk("config", "--config", "a.yaml")
    shown = yaml.safe_load(result.out)["judged"]["resources_servers"]["judged"]
    expected = {"judge": "nonsense", "digits": "many", "notes": "many", "pause": [77], "breaks": 5, "extra": 5}
    assert {key: shown[key] for key in expected} == expected
    assert (shown["needed"], shown["key"]) == ("***", "***")
    errors = result.err.removeprefix("Error: ").splitlines()
    prefix = "judged.resources_servers.judged."
    places = sorted(line.partition(prefix)[2].partition(":")[0] for line in errors)
    assert places == ["breaks", "digits", "extra", "judge", "needed", "pause"], errors


@pytest.mark.slow
def test_a_node_validates_only_the_environments_it_serves(gymsdk: Command, workdir: Path) -> None:
    (workdir / "a.yaml").write_text(INVALID.replace("scripted/orakel", "scripted/null"))
    result = gymsdk("serve", "--config", "a.yaml", "--role", "model", "--host", "203.0.113.7", "--insecure")
    assert "203.0.113.7 is not an address of this machine" in result.err
