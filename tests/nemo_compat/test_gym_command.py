"""`gym`, the command of NeMo Gym 0.7, runs gymsdk's commands with the same options."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_compat.conftest import AGENT, build_rows, find_free_port, serve_policy

pytestmark = pytest.mark.timeout(180)

GYM = [sys.executable, "-c", "from gymsdk_nemo_compat.gym import main; main()"]


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with serve_policy() as url:
        yield url


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    lines = [{key: value for key, value in row.items() if key != "agent_ref"} for row in build_rows(3)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def gym(folder: Path, *arguments: str, code: int = 0) -> str:
    """Run `gym` in *folder*; return its output and errors."""
    done = subprocess.run([*GYM, *arguments], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("named", ["tool_call", "tool_call/tool_call"])
def test_eval_run_starts_servers_collects_and_stops_them(tmp_path: Path, engine: str, rows: Path, named: str) -> None:
    port = find_free_port()
    served = ["--resources-server", named, "--model-type", "vllm_model", f"+head_server.port={port}"]
    model = ["--model", "policy", "--model-url", engine, "--model-api-key", "none", "--temperature", "0.5"]
    collected = ["-a", AGENT, "-i", str(rows), "-o", "out.jsonl", "--num-repeats", "2", "--limit", "2"]
    output = gym(tmp_path, "eval", "run", *served, *model, *collected)
    assert "mean reward" in output
    assert "stopping" not in output
    lines = read(tmp_path / "out.jsonl")
    assert [line["reward"] for line in lines] == [1.0] * 4
    assert {line["responses_create_params"]["temperature"] for line in lines} == {0.5}
    assert json.loads((tmp_path / "out_aggregate_metrics.json").read_text())
    assert "no head answers" in gym(tmp_path, "env", "status", f"+head_server.port={port}", code=1)


def test_rows_can_be_sent_to_servers_that_run(tmp_path: Path, engine: str, rows: Path) -> None:
    head = f"+head_server.port={find_free_port()}"
    command = [*GYM, "env", "start", "--environment", "tool_call", "--model-type", "vllm_model", head]
    command += ["--model", "policy", "--model-url", engine]
    servers = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert servers.stdout is not None
        servers.stdout.readline()
        status = json.loads(gym(tmp_path, "env", "status", "--json", head))
        assert {server["name"] for server in status["servers"]} >= {AGENT, "tool_call", "policy_model"}
        collected = ["--input", str(rows), "--output", "out.jsonl", "--agent", AGENT, "--top-p", "0.9"]
        gym(tmp_path, "eval", "run", "--no-serve", *collected, head)
        assert [line["responses_create_params"]["top_p"] for line in read(tmp_path / "out.jsonl")] == [0.9] * 3
    finally:
        servers.terminate()
        servers.communicate(timeout=30)


def test_configurations_are_checked_and_shown_without_servers(tmp_path: Path, engine: str) -> None:
    model = ["--model-type", "vllm_model", "+policy_model_name=policy", f"+policy_base_url={engine}"]
    assert AGENT in gym(tmp_path, "env", "validate", "--environment", "tool_call", *model)
    assert "policy_model_name" in gym(
        tmp_path, "env", "validate", "--environment", "tool_call", "--model-type", "vllm_model", code=2
    )
    file = tmp_path / "mine.yaml"
    file.write_text(
        "config_paths: [resources_servers/tool_call/configs/tool_call.yaml,"
        " responses_api_models/vllm_model/configs/vllm_model.yaml]\n"
    )
    resolved = gym(tmp_path, "env", "resolve", "--config", str(file), *model[2:])
    assert "tool_call_simple_agent" in resolved


def test_an_override_reaches_a_setting_without_the_kind_of_its_server(tmp_path: Path, engine: str) -> None:
    served = ["--environment", "tool_call", "--model-type", "vllm_model"]
    served += ["+policy_model_name=policy", f"+policy_base_url={engine}"]
    assert AGENT in gym(tmp_path, "env", "validate", *served, "tool_call.calls=[1, 2]", "policy_model.model=other")
    wrong = gym(tmp_path, "env", "validate", *served, "+tool_call.cals=[1, 2]", code=2)
    assert (
        "tool_call.resources_servers.tool_call.cals: no setting of environment 'tool_call'; did you mean 'ca" in wrong
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("eval profile --inputs x", "gymsdk profile NAME"),
        ("eval reverify -i x", "gymsdk reverify FOLDER"),
        ("dataset collate --mode train_preparation", "gymsdk tasks --check"),
        ("list models", "gym list environments"),
        ("env start", "--environment NAME"),
        ("eval run -i rows.jsonl -o out.jsonl", "names no server"),
        ("eval run --environment tool_call -o out.jsonl", "input_jsonl_fpath is missing"),
        ("eval run --environment tool_call --split train -o out.jsonl", "--dataset NAME"),
        ("eval run --no-serve --environment tool_call -o out.jsonl", "leave out --no-serve"),
        ("eval run --limit few", "--limit"),
        ("eval start", "No such command"),
    ],
)
def test_wrong_arguments_are_explained(tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "rows.jsonl").touch()
    assert message in gym(tmp_path, *arguments.split(), code=2)


def test_environments_are_listed(tmp_path: Path) -> None:
    assert "tool_call" in gym(tmp_path, "list", "environments")
    assert any(server["name"] == "tool_call" for server in json.loads(gym(tmp_path, "list", "--json")))
    assert gym(tmp_path, "--version").startswith("gymsdk ")
