"""`RunHelper` starts, watches and stops the servers of a training run, with a token made for the run."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gymsdk.credentials import TOKEN_FILE_VARIABLE
from gymsdk.errors import BadConfig, UsageError
from nemo_compat.conftest import Start, build_config, find_free_port, list_server_processes, parse, read_command
from nemo_gym.cli import RunHelper
from nemo_gym.server_utils import BaseServerConfig, ServerClient

pytestmark = pytest.mark.timeout(120)


def request(head: BaseServerConfig, **headers: str) -> int:
    return httpx.get(f"http://127.0.0.1:{head.port}/global_config_dict_yaml", headers=headers).status_code


def wait_until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_servers_require_a_token_that_child_processes_find(start: Start) -> None:
    assert TOKEN_FILE_VARIABLE not in os.environ
    helper, head = start()
    assert request(head) == 401
    assert request(head, authorization="Bearer wrong") == 401
    file = Path(os.environ[TOKEN_FILE_VARIABLE])
    assert file.stat().st_mode & 0o077 == 0
    assert request(head, authorization=f"Bearer {file.read_text().strip()}") == 200
    code = (
        "from nemo_gym.server_utils import *;"
        f"print(*ServerClient.load_from_global_config(BaseServerConfig(host='127.0.0.1', port={head.port}))"
        ".global_config_dict)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "tool_call_simple_agent" in child.stdout, child.stderr
    helper.shutdown()
    assert not file.exists()
    assert TOKEN_FILE_VARIABLE not in os.environ


def test_a_token_file_of_the_configuration_is_used(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("a-token-that-is-long-enough-for-everyone")
    file.chmod(0o600)
    helper, head = start(token_file=str(file))
    assert request(head) == 401
    assert request(head, authorization=f"Bearer {file.read_text()}") == 200
    assert ServerClient.load_from_global_config(head).global_config_dict
    helper.shutdown()
    assert file.exists()


def test_clients_without_a_token_need_insecure(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    _, head = start(insecure=True)
    assert request(head) == 200
    assert "insecure: true: everyone who reaches" in capfd.readouterr().err


def test_poll_notices_that_the_servers_have_ended(start: Start) -> None:
    helper, _ = start()
    helper.poll()
    (pid,) = (pid for pid in list_server_processes() if b"process_guard" not in read_command(pid))
    os.kill(pid, signal.SIGKILL)

    def get_problem() -> str:
        try:
            helper.poll()
        except RuntimeError as error:
            return str(error)
        return ""

    wait_until(lambda: bool(get_problem()))
    assert "finished unexpectedly" in get_problem()
    assert "SIGKILL" in get_problem()
    helper.shutdown()
    another, head = start()
    another.poll()
    assert ServerClient.load_from_global_config(head).global_config_dict


def test_shutdown_leaves_no_process(start: Start) -> None:
    helper, head = start()
    pids = list_server_processes()
    assert pids
    helper.shutdown()
    helper.shutdown()
    assert not list_server_processes()
    assert not any(map(read_command, pids))
    assert not accepts(head.port)
    with pytest.raises(RuntimeError, match="shutdown"):
        helper.poll()


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "forgets them"])
def test_the_servers_end_with_the_trainer(engines: list[str], is_killed: bool) -> None:
    config = build_config(engines)
    script = f"""
        import time
        from nemo_gym.cli import GlobalConfigDictParserConfig, RunHelper
        from omegaconf import DictConfig
        options = dict(skip_load_from_cli=True, skip_load_from_dotenv={is_killed})
        RunHelper().start(GlobalConfigDictParserConfig(initial_global_config_dict=DictConfig({config!r}), **options))
        print("ready", flush=True)
        time.sleep({600 if is_killed else 0})
        """
    port = config["head_server"]["port"]
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        if is_killed:
            assert accepts(port)
            trainer.kill()
        assert trainer.wait(60) == (-signal.SIGKILL if is_killed else 0)
    wait_until(lambda: not accepts(port), 40.0 if is_killed else 0.1)


def test_a_wrong_configuration_is_refused_before_a_process_starts_and_a_port_in_use_later(
    engines: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    policy = {"responses_api_models": {"gymsdk_model": {"model": "scripted/oracle"}}}
    agent = {"responses_api_agents": {"simple_agent": {}}}
    for config, error, message in (
        (build_config(engines, config_paths=["nothing.yaml"]), BadConfig, "nothing.yaml"),
        (build_config(engines, config_paths=[]), UsageError, "config_paths"),
        (build_config(engines, policy_api_key="${nowhere}"), BadConfig, "nowhere"),
        ({"policy_model": policy, "agent": agent}, UsageError, "'agent' does not name its resources server"),
    ):
        with pytest.raises(error, match=message):
            RunHelper().start(parse(config))
    # The process of the servers would have written the error, too.
    assert capfd.readouterr().err == ""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=str(port)):
            RunHelper().start(parse(build_config(engines, head_server={"host": "127.0.0.1", "port": port})))
    assert not list_server_processes()


def test_a_helper_runs_servers_once(start: Start, engines: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"start\(\) was never called"):
        RunHelper().poll()
    helper, _ = start()
    with pytest.raises(RuntimeError, match="runs servers already"):
        helper.start(parse(build_config(engines)))


def test_files_of_the_user_name_environments(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        """
        shop: {resources_servers: {tool_call: {entrypoint: app.py, domain: agent}}}
        shop_agent:
          responses_api_agents:
            simple_agent:
              entrypoint: app.py
              resources_server: {type: resources_servers, name: shop}
              model_server: {type: responses_api_models, name: policy_model}
        """
    )
    model = "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml"
    _, head = start(config_paths=[str(file), model])
    config = ServerClient.load_from_global_config(head).global_config_dict
    assert config.shop_agent.responses_api_agents.simple_agent.resources_server.name == "shop"


def test_the_command_line_and_the_env_file_are_read(
    engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build_config(engines)
    del config["policy_model_name"], config["head_server"]
    file, port = tmp_path / "env.yaml", find_free_port()
    file.write_text(f"policy_model_name: from_file\nhead_server: {{host: 127.0.0.1, port: {find_free_port()}}}\n")
    monkeypatch.setattr(sys, "argv", ["train.py", f"+head_server.port={port}"])
    settings = parse(config).model_copy(update={"dotenv_path": file, "skip_load_from_cli": False})
    helper = RunHelper()
    helper.start(settings)
    try:
        head = BaseServerConfig(host="127.0.0.1", port=port)
        assert ServerClient.load_from_global_config(head).global_config_dict.policy_model_name == "from_file"
    finally:
        helper.shutdown()
