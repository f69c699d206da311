"""Hosted models: the openai SDK against a real policy server on loopback."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from models.test_endpoint import BOTH, FixedModel, serve_model

from gymsdk import model
from gymsdk.errors import BadModelOption, Failed
from gymsdk.responses import Api
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.testing.faults import Faults
from gymsdk.types import Item, Model

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in ["OPENAI_API_KEY", "OPENAI_BASE_URL", "GYMSDK_API_KEY", "GYMSDK_BASE_URL"]:
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@asynccontextmanager
async def serve_rejections(status: int, message: str) -> AsyncIterator[tuple[str, list[str]]]:
    keys: list[str] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers["Authorization"])
        return web.json_response({"error": {"message": message}}, status=status)

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    async with serve(application) as url:
        yield url, keys


async def test_a_hosted_model_uses_the_responses_api_by_default() -> None:
    recorder = FixedModel()
    async with serve_model(recorder, "openai/stub") as policy:
        await policy.respond({"input": "hi", "max_output_tokens": 5, "metadata": {"extra_body": '{"seed": 1}'}})
    assert recorder.requests == [{"input": "hi", "max_output_tokens": 5, "seed": 1, "model": "stub"}]


async def test_a_single_error_is_retried() -> None:
    # With this seed the first call fails and the second call succeeds.
    async with serve_model(FixedModel(), "openai/stub", Faults(errors=0.5, seed=3), retries=3) as policy:
        assert (await policy.respond({"input": "hi"}))["status"] == "completed"


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [(400, "model_refused", False), (401, "model_unauthorized", False), (429, "model_rate_limited", True)],
)
async def test_an_error_response_has_its_kind_and_not_the_key(status: int, kind: str, retryable: bool) -> None:
    async with serve_rejections(status, f"no, {KEY}") as (url, keys):
        policy = model("openai/gpt-5", base_url=url, api_key=KEY, retries=0)
        with pytest.raises(Failed, match=f"answered {status}: .*no, ") as caught:
            await policy.respond({"input": "hi"})
        with pytest.raises(Failed) as broken:
            await model("openai/gpt-5", base_url=url, api_key=f"{KEY}\n", retries=0).respond({"input": "hi"})
    assert (caught.value.kind, caught.value.retryable, keys[0]) == (kind, retryable, f"Bearer {KEY}")
    assert KEY not in f"{caught.value}{policy!r}{vars(policy)}{broken.value}"


@pytest.mark.slow
def test_a_model_works_in_several_event_loops_and_leaves_nothing_open(recwarn: pytest.WarningsRecorder) -> None:
    built: list[Model] = []

    async def run(port: int) -> int:
        async with serve(build_app(FixedModel()), port=port) as url:
            built[:] = built or [model("openai/gpt-5", base_url=url, api_key=KEY)]
            await built[0].respond({"input": "hi"})
        return int(url.split(":")[2].partition("/")[0])

    asyncio.run(run(asyncio.run(run(0))))
    gc.collect()
    # pytest-asyncio keeps an open event loop for earlier tests, which `asyncio.run` makes it forget.
    assert [text for warning in recwarn if "unclosed event loop" not in (text := str(warning.message))] == []


@pytest.mark.slow
async def test_models_can_be_dropped_while_others_connect() -> None:
    async with serve(build_app(FixedModel())) as url:
        for number in range(4):
            # Other options give another client; the previous one is garbage by now.
            policy = model("openai/gpt-5", base_url=url, api_key=KEY, retries=0, timeout=20 + number)
            gc.collect()
            async with asyncio.TaskGroup() as group:
                calls = [group.create_task(policy.respond({"input": "hi"})) for _ in range(16)]
    assert all(call.result()["status"] == "completed" for call in calls)


async def test_the_key_and_base_url_of_the_folder_belong_together(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_rejections(400, "no") as (url, keys):
        (folder / "env.yaml").write_text(f"policy_base_url: {url}\npolicy_api_key: sk-folder")
        (folder / "env.yaml").chmod(0o600)
        with pytest.raises(Failed, match=r"127\.0\.0\.1"):
            await model("openai/gpt-5").respond({"input": "hi"})
    assert keys == ["Bearer sk-folder"]
    (folder / "env.yaml").write_text(f"policy_base_url: {url}")
    monkeypatch.setenv("GYMSDK_API_KEY", "sk-variable")
    with pytest.raises(BadModelOption, match="needs a key"):
        model("openai/gpt-5")
    monkeypatch.delenv("GYMSDK_API_KEY")
    (folder / "env.yaml").write_text(f"policy_base_url: {url}\npolicy_api_key: sk-folder")
    with pytest.raises(BadModelOption, match="needs a key"):
        model("openai/gpt-5", base_url=url)
    monkeypatch.setenv("OPENAI_BASE_URL", url)
    with pytest.raises(BadModelOption, match="needs a key"):
        model("openai/gpt-5")
    monkeypatch.delenv("OPENAI_BASE_URL")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-variable")
    assert vars(model("openai/gpt-5"))["_host"] == "api.openai.com"


@BOTH
async def test_pinned_fields_are_sent_with_the_headers(api: Api) -> None:
    bodies: list[Item] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json() | {"team": request.headers["X-Team"]})
        return web.json_response({"error": {"message": f"who is {request.headers['X-Team']}?"}}, status=400)

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    async with serve(application) as url:
        options = {"pinned": {"temperature": 0.5}, "headers": {"X-Team": "hush"}, "extra_body": {"seed": 7}}
        policy = model("openai/gpt-5", base_url=url, api_key=KEY, api=api, retries=0, **options)
        with pytest.raises(Failed, match=r"who is \*\*\*") as caught:
            await policy.respond({"input": "hi", "temperature": 0.9})
    assert bodies[0].items() >= {"temperature": 0.5, "seed": 7, "team": "hush"}.items()
    assert "hush" not in f"{caught.value}{policy!r}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": True, "api_key": KEY}, "token ids"),
        ({"base_url": ["http://a/v1", "http://b/v1"], "api_key": KEY}, "endpoint/gpt-5 for several"),
        ({}, "openai/gpt-5 needs a key: set OPENAI_API_KEY, or policy_api_key"),
    ],
)
def test_a_wrong_option_of_a_hosted_model_or_a_missing_sdk_is_rejected_when_it_is_built(
    options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadModelOption, match=message):
        model("openai/gpt-5", **options)
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(BadModelOption, match=r"pip install 'gymsdk\[openai\]'"):
        model("openai/gpt-5", api_key=KEY)


async def test_an_address_in_the_name_gets_only_the_key_of_the_same_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve_rejections(400, "no") as (url, keys):
        monkeypatch.setenv("OPENAI_API_KEY", "sk-variable")
        with pytest.raises(BadModelOption, match=r"no key for http://127.*write endpoint/gpt-5@http://127"):
            model(f"openai/gpt-5@{url}")
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        with pytest.raises(Failed):
            await model(f"openai/gpt-5@{url}").respond({"input": "hi"})
    assert keys == ["Bearer sk-variable"]
