"""Keys that a server repeats are redacted in messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count

import pytest
from aiohttp import web
from pydantic import SecretStr

from gymsdk import credentials, model, responses
from gymsdk.errors import Failed
from gymsdk.http import errors
from gymsdk.responses import Api
from gymsdk.testing.endpoint import serve

KEY = "sk-very-secret"


@pytest.mark.parametrize("secret", ["sk-plain", "sk/with/slashes", """sk'"both\\quotes""", "sk-späce "])
@pytest.mark.parametrize("written", [str, repr, json.dumps, lambda text: json.dumps(text).replace("/", "\\/")])
def test_a_key_is_redacted_in_any_encoding(secret: str, written: Callable[[str], str]) -> None:
    with pytest.raises(Failed) as caught, credentials.redact_failures(SecretStr(secret)):
        raise Failed(f"wrong key {written(secret)}", kind="model_refused")
    assert "***" in str(caught.value)
    assert "sk" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("wrong key any", "wrong key ***"),
        ("wrong key 'any'", "wrong key '***'"),
        ("Bearer any, of many", "Bearer ***, of many"),
        ("anybody may", "anybody may"),
    ],
)
def test_a_short_key_is_redacted_as_a_whole_word_only(text: str, redacted: str) -> None:
    assert credentials.redact(text, [SecretStr("any")]) == redacted


def test_a_message_is_truncated_only_after_redaction() -> None:
    for before in range(credentials.MAX_MESSAGE_CHARS - 20, credentials.MAX_MESSAGE_CHARS):
        with pytest.raises(Failed) as caught, credentials.redact_failures(SecretStr(KEY)):
            raise Failed("x" * before + KEY, kind="model_refused")
        assert "sk" not in str(caught.value)


def build_bodies(authorization: str, padding: int) -> list[object]:
    error = {"message": f"{'x' * padding}Incorrect API key provided: {authorization}", "code": authorization}
    failed = [{"status": "failed", "error": error, "output": []}, {"error": error, "output": []}]
    return [*failed, {"error": error}, {"detail": error}, error["message"], [authorization]]


@pytest.mark.parametrize("status", [200, 401, 422, 500])
@pytest.mark.parametrize("provider", ["endpoint", "vllm", "openai"])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_no_failure_repeats_the_key_a_server_echoes(provider: str, status: int, api: Api) -> None:
    calls, keys = count(), []

    async def echo(request: web.Request) -> web.StreamResponse:
        keys.append(request.headers["Authorization"])
        form, padding = divmod(next(calls), 3)
        padding = (0, errors.MAX_EXCERPT_CHARS - 60, credentials.MAX_MESSAGE_CHARS - 120)[padding]
        return web.json_response(build_bodies(keys[-1], padding)[form], status=status)

    application = web.Application()
    application.router.add_post("/{path:.*}", echo)
    async with serve(application) as url:
        policy = model(f"{provider}/m", base_url=url, api_key=KEY, api=api, retries=0)
        for _ in range(3 * len(build_bodies("", 0))):
            with pytest.raises(Failed) as caught:
                await responses.query_model(policy, {"input": "hi"}, episode=None)
            assert "sk-" not in f"{caught.value}{caught.value!r}{policy!r}{vars(policy)}"
    assert set(keys) == {f"Bearer {KEY}"}
