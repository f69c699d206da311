"""The sampling parameters of a run, and its messages about them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gymsdk.config.model import Deployment, ModelServerConfig
from gymsdk.deploy.process import serve as serve_deployment
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.run import Run, execute
from gymsdk.rollouts.settings import RunLimits
from gymsdk.testing.endpoint import serve
from gymsdk.types import Item
from rollouts.conftest import RecordingProgress

ANSWER: Item = {"choices": [{"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}]}
FIXED = {"temperature": 1.0, "top_p": 1.0}


@pytest.fixture(autouse=True)
def _sums(installed: Callable[..., Path]) -> None:
    installed()


class Recorder:
    """An engine that records the sampling parameters of each request."""

    def __init__(self) -> None:
        self.sent: list[Item] = []
        self.application = web.Application()
        self.application.router.add_post("/v1/chat/completions", self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.sent.append({key: body[key] for key in ("temperature", "top_p", "top_k") if key in body})
        return web.json_response(ANSWER)


def play(
    out: Path, *, resume: bool = False, through_servers: bool = False, **plan: Any
) -> tuple[list[Item], list[str]]:
    """Play a run; return the sampling parameters of each request, and the messages about sampling."""
    recorder, progress = Recorder(), RecordingProgress()
    pins = {"pinned": plan.pop("pinned", {})}

    async def play_with(**model: Any) -> None:
        given = {"limit": 2, "environments": {"sums": {}}, **model, **plan}
        await execute(Run(Plan(**given), out, resume=resume, limits=RunLimits(attempts=1)), progress)

    async def run() -> None:
        async with serve(recorder.application) as url:
            if not through_servers:
                await play_with(model="vllm/m", model_options={"base_url": url, **pins})
                return
            policy = ModelServerConfig(name="vllm/m", options={"base_url": url})
            async with serve_deployment(["sums"], deployment=Deployment(model=policy)) as running:
                await play_with(head=running.head_url)

    asyncio.run(asyncio.wait_for(run(), 60))
    return recorder.sent, [message for message in progress.messages if message.startswith("sampling: ")]


def read_about(out: Path) -> Item:
    about: Item = json.loads((out / "run.json").read_bytes())
    return about


def forget(out: Path) -> None:
    """Make the run in *out* one that an earlier version began and did not finish."""
    about = read_about(out)
    del about["sampling"]
    (out / "run.json").write_text(json.dumps(about))
    (out / "rollouts.jsonl").write_bytes(b"")


@pytest.mark.parametrize(
    ("plan", "sent", "said"),
    [
        ({}, {}, "the engine's defaults"),
        ({"sampling": FIXED}, FIXED, "temperature 1.0, top_p 1.0; otherwise the engine's defaults"),
        ({"sampling": {"top_k": 5}, "pinned": {"top_k": 7}}, {"top_k": 7}, "top_k 7; otherwise the engine's defaults"),
        ({"sampling": {"top_p": 0.5}, "pinned": {"top_p": None}}, {}, "the engine's defaults"),
    ],
)
def test_a_run_says_what_it_sends(tmp_path: Path, plan: Item, sent: Item, said: str) -> None:
    assert play(tmp_path / "out", **plan) == ([sent, sent], [f"sampling: {said}"])
    assert read_about(tmp_path / "out")["sampling"] == said


def test_a_run_with_servers_says_that_the_defaults_are_theirs(tmp_path: Path) -> None:
    sent, said = play(tmp_path / "out", through_servers=True)
    assert (sent, said) == ([{}, {}], ["sampling: the defaults of the servers' model"])


def test_a_scripted_policy_has_no_sampling(tmp_path: Path) -> None:
    assert play(tmp_path / "out", model="scripted/oracle", model_options={}) == ([], [])
    assert "sampling" not in read_about(tmp_path / "out")


@pytest.mark.parametrize("through_servers", [False, True])
@pytest.mark.slow
def test_a_run_begun_before_keeps_its_sampling_at_each_resume(tmp_path: Path, through_servers: bool) -> None:
    out = tmp_path / "out"
    play(out, through_servers=through_servers)
    forget(out)
    for _ in range(2):
        sent, said = play(out, resume=True, through_servers=through_servers)
        assert sent == [FIXED, FIXED]
        assert "temperature 1.0, top_p 1.0" in said[0]
        (out / "rollouts.jsonl").write_bytes(b"")
    assert [resume["sampling"] for resume in read_about(out)["resumed"]] == [said[0].removeprefix("sampling: ")] * 2


def test_a_run_of_this_version_keeps_the_defaults_of_the_engine_on_resume(tmp_path: Path) -> None:
    out = tmp_path / "out"
    play(out)
    (out / "rollouts.jsonl").write_bytes(b"")
    assert play(out, resume=True) == ([{}, {}], ["sampling: the engine's defaults"])


def test_a_row_and_a_pin_keep_their_values_in_a_run_begun_before(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan: Item = {"sampling": {"metadata": {"extra_body": '{"temperature": 0.3}'}}, "pinned": {"top_p": 0.9}}
    play(out, **plan)
    forget(out)
    assert play(out, resume=True, **plan)[0] == [{"temperature": 0.3, "top_p": 0.9}] * 2
