"""An environment that uses Ray itself, the example of docs/ray.md, is served and graded on a cluster."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]

PAGE = Path(__file__).resolve().parents[2] / "docs" / "ray.md"
GYMSDK = [sys.executable, "-m", "gymsdk"]


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Install the example where this process, its children and the nodes of a later cluster find it."""
    source = re.search(r'```python title="gym_env_spread.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert source is not None
    (tmp_path / "gym_env_spread.py").write_text(source[1])
    metadata = tmp_path / "gym_env_spread-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: gym-env-spread\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[gymsdk.environments]\nspread = gym_env_spread\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "spread"


@pytest.mark.parametrize("options", [["--separate"], ["--replicas", "2", "--cpus-per-replica", "0.5"]])
def test_functions_of_ray_run_in_every_kind_of_server(
    spread: str, cluster: Any, tmp_path: Path, options: list[str]
) -> None:
    serve = [*GYMSDK, "serve", spread, "--ray-address", cluster.address, *options, "--port", "0", "--json"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            head = json.loads(process.stdout.readline())["head"]
            run = [*GYMSDK, "rollout", spread, "--head", head, "-k", "8", "--output", str(tmp_path / "run")]
            completed = subprocess.run(run, capture_output=True, text=True, timeout=200, check=False)
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert completed.returncode == 0, completed.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()]
    assert [(line["reward"], line["reward_components"]["right"]) for line in lines] == [(1.0, 1.0)] * 8
