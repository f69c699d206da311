"""What the plan of a deployment or a run can refuse is refused before Ray starts, in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(200)]

FILES = {
    "agent.yaml": "simple_agent: {responses_api_agents: {simple_agent: {entrypoint: app.py}}}",
    "policy.yaml": "policy_model: {responses_api_models: {gymsdk_model: {model: scripted/oracle}}}",
    "resources.yaml": "tool_call: {resources_servers: {tool_call: {entrypoint: app.py}}}",
    "modelless.yaml": (
        "agent: {responses_api_agents: {simple_agent: {resources_server: {type: resources_servers, name: tool_call}}}}"
    ),
    "held/rollouts.jsonl": "",
    "broken.jsonl": "{\n",
}

SERVE, LOCAL = "serve --port 0", "--ray-address local"


@pytest.mark.parametrize(
    ("command", "cause"),
    [
        (f"{SERVE} unknown_one {LOCAL}", "no environment named 'unknown_one'"),
        (f"{SERVE} math {LOCAL} --set nope=3", "no setting 'nope'"),
        (f"{SERVE} math {LOCAL} --model unknown/x", "no model named 'unknown/x'"),
        (f"{SERVE} math {LOCAL} --model vllm/x", "needs a base URL"),
        (f"{SERVE} math {LOCAL} --server-port nope=9000", "no server 'nope'"),
        (f"{SERVE} math {LOCAL} --server-port math=9000 --server-port policy_model=9000", "both have port 9000"),
        (f"serve --port 9000 math {LOCAL} --server-port math=9000", "both have port 9000"),
        (f"{SERVE} math {LOCAL} --host 0.0.0.0", "require no token"),
        (f"{SERVE} math {LOCAL} --token-file none.txt", "cannot be read"),
        (f"{SERVE} math {LOCAL} --tls-cert none.pem --tls-key none.pem", "does not exist"),
        (f"{SERVE} {LOCAL} --role model", "no model to serve"),
        (f"{SERVE} math {LOCAL} --token-capture-dir tokens", "token ids can be captured only"),
        (f"{SERVE} math {LOCAL} --replicas 500", "500 replicas"),
        (f"{SERVE} math {LOCAL} --replicas 1 --gpus-per-replica 64", "64 GPUs, and the Ray cluster has"),
        (f"{SERVE} --config agent.yaml --config policy.yaml", "does not name its resources server"),
        (f"{SERVE} --config modelless.yaml --config resources.yaml", "does not name its model server"),
        (f"rollout unknown_one {LOCAL} --output run", "no environment named 'unknown_one'"),
        (f"rollout math {LOCAL} --set nope=3 --output run", "no setting 'nope'"),
        (f"rollout math {LOCAL} --model unknown/x --output run", "no model named 'unknown/x'"),
        (f"rollout math {LOCAL} --split unknown --output run", "no split 'unknown'"),
        (f"rollout math {LOCAL} --tasks broken.jsonl --output run", "not valid JSON"),
        (f"rollout math {LOCAL} --output held", "but no run"),
        (f"rollout math {LOCAL} --replicas 1 --set nope=3 --output run", "no setting 'nope'"),
        (f"rollout math {LOCAL} --replicas 1 --split unknown --output run", "no split 'unknown'"),
        (f"rollout math {LOCAL} --replicas 1 --output held", "but no run"),
        (f"rollout math {LOCAL} --replicas 500 --output run", "500 replicas"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line_before_ray_starts(command: str, cause: str, tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    sessions = tmp_path / "ray"
    completed = subprocess.run(
        [sys.executable, "-m", "gymsdk", *command.split()],
        cwd=tmp_path,
        env=os.environ | {"RAY_TMPDIR": str(sessions)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (completed.returncode, completed.stdout) == (2, ""), completed.stderr
    assert cause in completed.stderr
    assert completed.stderr.count("\n") == 1, completed.stderr
    assert not sessions.exists()
    assert not (tmp_path / "run").exists()
