"""A deployment that cannot be served is refused before a process or vLLM starts for it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gymsdk.config.model import AGENTS, AgentServerConfig, Deployment, ModelServerConfig, ServerConfig
from gymsdk.deploy.preflight import check_deployment
from gymsdk.errors import UsageError

VLLM = """\
#!/bin/sh
touch started
exit 1
"""


def build_agent(**refers: str) -> ServerConfig:
    part = AgentServerConfig()
    return ServerConfig(name="agent", kind=AGENTS, implementation="simple_agent", kind_settings=part, refers=refers)


@pytest.mark.parametrize(
    ("deployment", "cause"),
    [
        (Deployment(environments={"unknown_one": {}}), "no environment named 'unknown_one'"),
        (Deployment(environments={"tool_call": {"nope": 1}}), "no setting 'nope'"),
        (Deployment(environments={"tool_call": {}}, model=ModelServerConfig(name="unknown/x")), "no model named"),
        (Deployment(servers=(build_agent(),)), "does not name its resources server"),
        (Deployment(servers=(build_agent(resources_server="tool_call"),)), "does not name its model server"),
        (
            Deployment(environments={"tool_call": {}}, server_ports={"tool_call": 9000, "policy_model": 9000}),
            "tool_call both have port 9000 of 127.0.0.1",
        ),
        (Deployment(environments={"tool_call": {}}, port=9000, server_ports={"tool_call": 9000}), "head_server both"),
        (Deployment(environments={"tool_call": {}}, host="0.0.0.0"), "require no token"),
    ],
)
def test_a_wrong_deployment_is_refused(deployment: Deployment, cause: str) -> None:
    with pytest.raises(UsageError, match=cause):
        check_deployment(deployment)


def test_a_port_in_use_is_refused_unless_its_socket_is_this_process_s_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as at:
        deployment = Deployment(environments={"tool_call": {}}, port=at.getsockname()[1])
        with pytest.raises(UsageError, match=r"the head cannot listen: port .* is in use"):
            check_deployment(deployment)
        check_deployment(deployment, bound=["head_server"])


def test_vllm_does_not_start_for_a_wrong_deployment(tmp_path: Path) -> None:
    (program := tmp_path / "vllm").write_text(VLLM)
    program.chmod(0o755)
    options = ("--server-port", "nope=9000", "--port", "0", "--launch-vllm", "--model", "vllm/policy")
    completed = subprocess.run(
        [sys.executable, "-m", "gymsdk", "serve", "math", *options, "--ray-address", "none"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (completed.returncode, completed.stderr.count("\n")) == (2, 1), completed.stderr
    assert "no server 'nope'" in completed.stderr
    assert not (tmp_path / "started").exists()
