"""A launched vLLM and real processes: it answers, is started again, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import io
import logging
import os
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

from .fakes import Fake, runs

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


async def echoed(engine: Engine) -> str:
    """What the model says, however long it takes to be there."""
    asked = model(f"vllm/{engine.name}", base_url=engine.url, retries=50, wait=0.1, timeout=60)
    response = await asked.respond({"input": "here I am"})
    text: str = response["output"][0]["content"][0]["text"]
    return text


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - processes tell of nothing
            await asyncio.sleep(0.02)


async def test_it_answers_once_the_context_opens_and_shows_what_it_writes(fake: Fake) -> None:
    out = io.StringIO()
    async with vllm("--dtype", "auto", out=out) as engine:
        assert "here I am" in await echoed(engine)
    assert fake.argv[:2] == ["serve", NAME]
    assert fake.argv[-2:] == ["--dtype", "auto"]
    assert out.getvalue().splitlines()[1] == "vllm | life 1"
    assert "'hermes'" in out.getvalue().splitlines()[0]


async def test_nothing_is_left_of_it_even_of_an_engine_that_no_signal_to_a_group_finds(fake: Fake) -> None:
    async with vllm():
        assert len(fake.left) == 3
    assert not fake.left


async def test_one_that_does_not_listen_is_killed(fake: Fake) -> None:
    fake.first("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    async with vllm(ending=0.5):
        pass
    assert not fake.left


async def test_one_that_is_killed_is_started_again_at_its_address_and_its_old_engine_is_gone(fake: Fake) -> None:
    async with vllm() as engine:
        ((pid, old, _),) = fake.lives
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not runs(old))
        assert "here I am" in await echoed(engine)
        assert engine.last_exit is not None
        assert (engine.last_exit.code, engine.last_exit.restarts) == (-9, 1)
    assert not fake.left


async def test_it_ends_where_its_warden_is_killed_and_is_started_again(fake: Fake) -> None:
    async with vllm() as engine:
        ((pid, old, warden),) = fake.lives
        os.kill(warden, signal.SIGKILL)
        await until(lambda: not runs(pid))
        # What it leaves is nobody's then: vLLM ends its engines itself when told to end, as it was.
        os.kill(old, signal.SIGKILL)
        await until(lambda: len(fake.lives) == 2)
        assert "here I am" in await echoed(engine)
    assert not fake.left


async def test_one_that_the_system_does_not_start_again_is_tried_until_it_is(
    fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    python = sys.executable
    async with vllm() as engine:
        ((pid, old, _),) = fake.lives
        shutil.move(python, f"{python}.away")
        os.kill(pid, signal.SIGKILL)
        await until(lambda: "cannot be started" in caplog.text)
        shutil.move(f"{python}.away", python)
        await until(lambda: not runs(old))
        assert "here I am" in await echoed(engine)
    assert not fake.left


async def test_it_ends_with_a_process_that_is_killed(fake: Fake, tmp_path: Path) -> None:
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
        PYTHON,
        str(script),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    assert await process.stdout.readline()
    assert len(fake.left) == 3
    process.kill()
    await process.wait()
    await until(lambda: not fake.left)


async def test_the_key_it_asks_for_is_in_no_variable_of_ours_for_separate_servers(
    fake: Fake, installed: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed()
    monkeypatch.setenv("VLLM_API_KEY", "hush")
    monkeypatch.delenv("GYMSDK_API_KEY", raising=False)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    words = ("serve", "sums", "--separate", "--launch-vllm", "--model", f"vllm/{NAME}", "--port", "0", "--json")
    process = await asyncio.create_subprocess_exec(
        PYTHON, "-m", "gymsdk", *words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    line = await process.stdout.readline()
    shown = servers(process.pid)
    process.send_signal(signal.SIGTERM)
    await process.communicate()
    assert line
    assert len(shown) > 1
    assert not any(b"GYMSDK_" in each for each in shown)
    assert not fake.left


def servers(pid: int) -> list[bytes]:
    """The variables of the servers that a process has started."""
    started = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    ours = [each for each in started if b"--only" in Path(f"/proc/{each}/cmdline").read_bytes()]
    return [Path(f"/proc/{each}/environ").read_bytes() for each in ours]


@pytest.mark.parametrize(
    ("written", "mend"),
    [
        ("KeyError: 'invalid tool call parser: x (chose from { hermes,mistral })'", "--tool-call-parser NAME"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "--max-model-len"),
        ("ValueError: No available memory for the cache blocks.", "raise -- --gpu-memory-utilization"),
        ("ValueError: Free memory on device cuda:0 (1/80 GiB) on startup is less than desired", "another process uses"),
        ("RuntimeError: Failed to infer device type", "no GPU"),
        ("OSError: x is not a local folder and is not a valid model identifier", "HF_TOKEN"),
        ("ValueError: something nobody has seen", "its output says why"),
    ],
)
async def test_one_that_does_not_start_says_why_and_what_mends_it(fake: Fake, written: str, mend: str) -> None:
    fake.first(f"print({written!r}); print('\\n'.join(['  at x'] * 9), flush=True); engine.kill(); sys.exit(1)")
    with pytest.raises(GymsdkError) as raised:
        async with vllm():
            pass
    assert "exit code 1" in str(raised.value)
    assert mend in str(raised.value)
    assert (written in str(raised.value)) != (mend == "its output says why")
    assert len(fake.lives) == 1
    assert not fake.left


async def test_flags_that_vllm_does_not_know_are_wrong_usage(fake: Fake) -> None:
    fake.first("print('vllm: error: unrecognized arguments: --nope'); sys.exit(2)")
    with pytest.raises(UsageError, match="--help=all"):
        async with vllm("--nope"):
            pass
    assert not fake.left


async def test_one_that_is_not_ready_in_time_is_ended(fake: Fake) -> None:
    fake.first("print('loading', flush=True); time.sleep(600)")
    with pytest.raises(GymsdkError, match=r"not ready within 1\.5 s(?s:.*)vllm \| loading"):
        async with vllm(starting=1.5):
            pass
    assert not fake.left


async def test_a_launch_that_is_given_up_leaves_nothing(fake: Fake) -> None:
    fake.first("time.sleep(600)")
    starting = asyncio.ensure_future(vllm().__aenter__())
    await until((fake.folder / "argv").exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert fake.lives
    assert not fake.left


async def test_a_port_that_is_lost_before_it_is_used_is_chosen_anew_once(fake: Fake) -> None:
    fake.first("if life == 1: print('OSError: [Errno 98] Address already in use', flush=True); sys.exit(1)")
    async with vllm() as engine:
        assert "here I am" in await echoed(engine)
    assert len(fake.lives) == 2


async def test_a_port_that_is_lost_each_time_is_told(fake: Fake) -> None:
    fake.first("print('OSError: [Errno 98] Address already in use', flush=True); sys.exit(1)")
    with pytest.raises(GymsdkError, match="--port N"):
        async with vllm():
            pass
    assert len(fake.lives) == 2


async def test_a_model_that_is_served_at_the_port_already_is_not_launched(fake: Fake) -> None:
    async with testing.serve(testing.build_app(model("scripted/echo"), name=NAME)) as url:
        with pytest.raises(UsageError, match=f"--base-url {url}"):
            async with vllm("--port", url.rpartition(":")[2].removesuffix("/v1")):
                pass
    assert not fake.lives


async def test_a_port_in_use_is_refused_before_anything_starts(fake: Fake) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        taken.settimeout(0)
        with pytest.raises(UsageError, match="in use"):
            async with vllm("--port", str(taken.getsockname()[1])):
                pass
    assert not fake.lives


async def test_one_that_serves_another_name_is_refused(fake: Fake) -> None:
    fake.first("sys.argv[sys.argv.index('--served-model-name') + 1] = 'other'")
    with pytest.raises(GymsdkError, match="serves other, and not 'Qwen/Qwen3-4B'"):
        async with vllm():
            pass
    assert not fake.left


async def test_one_that_asks_for_a_key_nobody_knows_says_where_it_goes(fake: Fake) -> None:
    fake.first(
        "from aiohttp import web\n"
        "async def no(request): return web.Response(status=401)\n"
        "async def well(request): return web.Response()\n"
        "app = web.Application(); app.add_routes([web.get('/health', well), web.get('/v1/models', no)])\n"
        "web.run_app(app, host='127.0.0.1', port=int(sys.argv[6]), print=None)\n"
    )
    with pytest.raises(UsageError, match="VLLM_API_KEY"):
        async with vllm():
            pass
    assert not fake.left


async def test_a_key_travels_in_the_environment_only(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    fake.first("assert os.environ['VLLM_API_KEY'] == 'sesame'")
    async with vllm() as engine:
        assert engine.key is not None
        assert engine.key.get_secret_value() == "sesame"
        assert "sesame" not in repr(engine)
    assert "sesame" not in " ".join(fake.argv)


async def test_tools_without_a_parser_are_warned_of(fake: Fake, caplog: pytest.LogCaptureFixture) -> None:
    async with vllm(name="my/policy"):
        pass
    assert "--enable-auto-tool-choice" not in fake.argv
    (warned,) = [
        each.getMessage() for each in caplog.records if (each.name, each.levelno) == ("gymsdk", logging.WARNING)
    ]
    assert "'my/policy'" in warned
