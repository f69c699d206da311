"""Launch the real vLLM, if it is on the PATH: it calls a tool and leaves no processes behind."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymsdk import model
from gymsdk.deploy.vllm import Engine, launch_vllm
from gymsdk.deploy.vllm_command import Launch
from gymsdk.http import client

from .fakes import is_running

VLLM = shutil.which("vllm")
FLAGS = ("--dtype", "float32", "--max-model-len", "2048", "--enforce-eager")
CALL = r'<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9]{1,3}\}\}\n</tool_call>'
TOOL = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(VLLM is None, reason="vllm is not on the PATH"),
]


@pytest.fixture
def qwen3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Qwen3 model with random weights, created with the Python interpreter that has vLLM installed."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert VLLM is not None
    folder = tmp_path / "tiny-qwen3"
    python = Path(Path(VLLM).read_text().partition("\n")[0].removeprefix("#!"))
    subprocess.run(
        [python, Path(__file__).parents[1] / "tokens" / "vllm" / "build_tiny_model.py", folder],
        check=True,
        capture_output=True,
    )
    return str(folder)


def find_descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants of *pid*."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            found += [int(folder.name), *find_descendants(int(folder.name))]
    return found


async def request_tool_call(engine: Engine) -> dict[str, Any]:
    policy = model(
        f"vllm/{engine.name}",
        base_url=engine.url,
        extra_body={"structured_outputs": {"regex": CALL}},
        retries=200,
        wait=1.0,
        timeout=600,
    )
    response = await policy.respond({"input": "add", "tools": [TOOL], "max_output_tokens": 200})
    item: dict[str, Any] = response["output"][-1]
    return item


async def test_vllm_calls_a_tool_restarts_after_a_kill_and_leaves_no_processes(qwen3: str) -> None:
    out = io.StringIO()
    async with launch_vllm(Launch(name=qwen3, flags=FLAGS), out=out) as engine:
        assert "'hermes'" in out.getvalue()
        assert (await request_tool_call(engine))["name"] == "add"
        first = engine.supervisor.pid("vllm")
        assert first is not None
        served = [first, *find_descendants(first)]
        assert len(served) >= 2
        os.kill(served[0], signal.SIGKILL)
        assert (await request_tool_call(engine))["type"] == "function_call"
        assert not any(is_running(pid) for pid in served)
        new_watcher = engine.supervisor.pid("vllm")
        assert new_watcher is not None
        pids = [new_watcher, *find_descendants(new_watcher)]
        assert len(pids) >= 3
    await client.aclose()
    assert not any(is_running(pid) for pid in pids)


async def test_vllm_ends_if_its_parent_process_is_killed(qwen3: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio\n"
        "from gymsdk.deploy.vllm import Launch, launch_vllm\n"
        "async def main():\n"
        f"    async with launch_vllm(Launch(name={qwen3!r}, flags={FLAGS!r})):\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(script), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    served = find_descendants(process.pid)
    assert len(served) >= 3
    process.kill()
    await process.wait()
    async with asyncio.timeout(30):
        while any(is_running(pid) for pid in served):  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.1)
