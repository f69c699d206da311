"""Launch a fake vLLM as real processes: it responds, restarts after a crash, and leaves no processes behind."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gymsdk import GymsdkError, UsageError, model, testing
from gymsdk.deploy.vllm import Engine, launch_vllm
from gymsdk.deploy.vllm_command import Launch
from gymsdk.http import client

from .fakes import FakeVllm, is_running

NAME = "Qwen/Qwen3-4B"
PYTHON = sys.executable


@asynccontextmanager
async def vllm(*flags: str, out: io.StringIO | None = None, **given: object) -> AsyncIterator[Engine]:
    try:
        launch = Launch.model_validate({"name": NAME, "flags": flags, "ending": 3.0, "starting": 60.0, **given})
        async with launch_vllm(launch, out=out or io.StringIO()) as engine:
            yield engine
    finally:
        await client.aclose()


async def request_echo(engine: Engine) -> str:
    """Return the response of the model, with retries until the server is ready."""
    policy = model(f"vllm/{engine.name}", base_url=engine.url, retries=50, wait=0.1, timeout=60)
    response = await policy.respond({"input": "here I am"})
    text: str = response["output"][0]["content"][0]["text"]
    return text


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - no event to wait for
            await asyncio.sleep(0.02)


async def test_vllm_responds_inside_the_context_and_its_output_is_relayed(fake: FakeVllm) -> None:
    out = io.StringIO()
    async with vllm("--dtype", "auto", out=out) as engine:
        assert "here I am" in await request_echo(engine)
        assert len(fake.running) == 3
    assert not fake.running, "the engine is outside the process group"
    assert fake.argv[:2] == ["serve", NAME]
    assert fake.argv[-2:] == ["--dtype", "auto"]
    assert out.getvalue().splitlines()[1] == "vllm | start 1"
    assert "'hermes'" in out.getvalue().splitlines()[0]


async def test_the_processes_of_vllm_do_not_import_from_the_working_folder(
    fake: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working_folder = tmp_path / "download"
    working_folder.mkdir()
    (working_folder / "pickle.py").write_text("origin = 'the working folder'")
    monkeypatch.chdir(working_folder)
    # As `multiprocessing` starts a child.
    command = "[sys.executable, '-c', 'import pickle; print(pickle.__file__)']"
    fake.set_startup_code(f"subprocess.run({command}, stdout=(folder / 'found').open('w'), check=True)")
    async with vllm():
        pass
    assert (tmp_path / "found").read_text().strip() == pickle.__file__


async def test_a_vllm_that_ignores_sigterm_is_killed(fake: FakeVllm) -> None:
    fake.set_startup_code("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    async with vllm(ending=0.5):
        pass
    assert not fake.running


@pytest.mark.parametrize("is_watcher", [False, True])
async def test_a_vllm_that_is_killed_or_loses_its_watcher_restarts_at_the_same_address(
    fake: FakeVllm, is_watcher: bool
) -> None:
    async with vllm() as engine:
        ((pid, engine_pid, watcher),) = fake.starts
        os.kill(watcher if is_watcher else pid, signal.SIGKILL)
        await wait_until(lambda: not is_running(pid if is_watcher else engine_pid))
        if is_watcher:
            # Without the watcher, nothing kills the engine of the fake. The real vLLM ends its engines on SIGTERM.
            os.kill(engine_pid, signal.SIGKILL)
        await wait_until(lambda: len(fake.starts) == 2)
        assert "here I am" in await request_echo(engine)
        assert engine.last_exit is not None
        assert engine.last_exit.restarts == 1
        assert is_watcher or engine.last_exit.code == -9
    assert not fake.running


async def test_a_failed_restart_is_retried_until_it_succeeds(fake: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    python = sys.executable
    async with vllm() as engine:
        ((pid, engine_pid, _),) = fake.starts
        shutil.move(python, f"{python}.moved")
        os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: "cannot be started" in caplog.text)
        shutil.move(f"{python}.moved", python)
        await wait_until(lambda: not is_running(engine_pid))
        assert "here I am" in await request_echo(engine)
    assert not fake.running


async def test_vllm_ends_if_its_parent_process_is_killed(fake: FakeVllm, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import asyncio, sys\n"
        "from gymsdk.deploy.vllm import Launch, launch_vllm\n"
        f"sys.executable = {sys.executable!r}\n"
        "async def main():\n"
        f"    async with launch_vllm(Launch(name={NAME!r}, ending=1.0)) as engine:\n"
        "        print(engine.url, flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(
        PYTHON, str(script), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert await process.stdout.readline()
    assert len(fake.running) == 3
    process.kill()
    await process.wait()
    await wait_until(lambda: not fake.running)


async def test_separate_servers_do_not_receive_the_api_key_in_gymsdk_variables(
    fake: FakeVllm, installed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed()
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.delenv("GYMSDK_API_KEY", raising=False)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    arguments = ("serve", "sums", "--separate", "--launch-vllm", "--model", f"vllm/{NAME}", "--port", "0", "--json")
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-m", "gymsdk", *arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    variables = read_server_environments(process.pid)
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert line
    assert len(variables) > 1
    assert not any(b"GYMSDK_" in environment for environment in variables)
    assert not fake.running


def read_server_environments(pid: int) -> list[bytes]:
    """Return the environment variables of each server that the process *pid* has started, and of its guard."""
    started = [Path("/proc", child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [
        child.joinpath("environ").read_bytes() for child in started if b"--only" in (child / "cmdline").read_bytes()
    ]


@pytest.mark.parametrize(
    ("output", "fix"),
    [
        ("KeyError: 'invalid tool call parser: x (chose from { hermes,mistral })'", "--tool-call-parser NAME"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "--max-model-len"),
        ("ValueError: No available memory for the cache blocks.", "raise -- --gpu-memory-utilization"),
        ("ValueError: Free memory on device cuda:0 (1/80 GiB) on startup is less than desired", "another process uses"),
        ("RuntimeError: Failed to infer device type", "no GPU"),
        ("OSError: x is not a local folder and is not a valid model identifier", "HF_TOKEN"),
        ("ValueError: an unknown error", "its output says why"),
    ],
)
async def test_a_failed_start_reports_the_cause_and_the_fix(fake: FakeVllm, output: str, fix: str) -> None:
    fake.set_startup_code(
        f"print({output!r}); print('\\n'.join(['  at x'] * 9), flush=True); engine.kill(); sys.exit(1)"
    )
    with pytest.raises(GymsdkError) as raised:
        async with vllm():
            pass
    assert "exit code 1" in str(raised.value)
    assert fix in str(raised.value)
    assert (output in str(raised.value)) != (fix == "its output says why")
    assert len(fake.starts) == 1
    assert not fake.running


TAKEN = "print('OSError: [Errno 98] Address already in use', flush=True); sys.exit(1)"


@pytest.mark.parametrize(
    ("code", "error", "message", "starts"),
    [
        ("print('vllm: error: unrecognized arguments: --nope'); sys.exit(2)", UsageError, "--help=all", 1),
        (TAKEN, GymsdkError, "--port N", 2),
        (
            "sys.argv[sys.argv.index('--served-model-name') + 1] = 'other'",
            GymsdkError,
            "serves other, and not 'Qwen/Qwen3-4B'",
            1,
        ),
        (
            "print('loading', flush=True); time.sleep(600)",
            GymsdkError,
            r"not ready within 2\.5 s(?s:.*)vllm \| loading",
            1,
        ),
    ],
    ids=["unknown flags", "a second taken port", "another model", "not ready in time"],
)
async def test_a_vllm_that_cannot_be_used_is_stopped_and_the_reason_reported(
    fake: FakeVllm, code: str, error: type[GymsdkError], message: str, starts: int
) -> None:
    fake.set_startup_code(code)
    with pytest.raises(error, match=message):
        async with vllm("--nope", starting=2.5 if "loading" in code else 60.0):
            pass
    assert len(fake.starts) == starts
    assert not fake.running


async def test_a_cancelled_launch_leaves_no_processes(fake: FakeVllm) -> None:
    fake.set_startup_code("time.sleep(600)")
    launch = asyncio.ensure_future(vllm().__aenter__())
    await wait_until((fake.folder / "argv").exists)
    launch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await launch
    assert fake.starts
    assert not fake.running


async def test_another_port_is_chosen_once_if_the_chosen_port_is_taken(fake: FakeVllm) -> None:
    fake.set_startup_code(f"if start_number == 1: {TAKEN}")
    async with vllm() as engine:
        assert "here I am" in await request_echo(engine)
    assert len(fake.starts) == 2


async def test_nothing_is_launched_at_a_port_in_use_and_a_model_that_is_served_there_is_named(fake: FakeVllm) -> None:
    async with testing.serve(testing.build_app(model("scripted/echo"), name=NAME)) as url:
        with pytest.raises(UsageError, match=f"--base-url {url}"):
            async with vllm("--port", url.rpartition(":")[2].removesuffix("/v1")):
                pass
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.settimeout(0)
        with pytest.raises(UsageError, match="in use"):
            async with vllm("--port", str(taken.getsockname()[1])):
                pass
    assert not fake.starts


async def test_a_required_api_key_that_is_not_set_is_reported_with_its_variable(fake: FakeVllm) -> None:
    fake.set_startup_code(
        "from aiohttp import web\n"
        "async def unauthorized(request): return web.Response(status=401)\n"
        "async def healthy(request): return web.Response()\n"
        "app = web.Application(); app.add_routes([web.get('/health', healthy), web.get('/v1/models', unauthorized)])\n"
        "web.run_app(app, host='127.0.0.1', port=int(sys.argv[6]), print=None)\n"
    )
    with pytest.raises(UsageError, match="VLLM_API_KEY"):
        async with vllm():
            pass
    assert not fake.running


async def test_the_api_key_is_passed_only_in_the_environment(fake: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    fake.set_startup_code("assert os.environ['VLLM_API_KEY'] == 'sesame'")
    async with vllm() as engine:
        assert engine.key is not None
        assert engine.key.get_secret_value() == "sesame"
        assert "sesame" not in repr(engine)
    assert "sesame" not in " ".join(fake.argv)


async def test_tools_without_a_parser_log_a_warning(fake: FakeVllm, caplog: pytest.LogCaptureFixture) -> None:
    async with vllm(name="my/policy"):
        pass
    assert "--enable-auto-tool-choice" not in fake.argv
    [warning] = [record for record in caplog.records if (record.name, record.levelno) == ("gymsdk", logging.WARNING)]
    assert "'my/policy'" in warning.getMessage()
