"""Endless or extremely compressed responses fail one call, and the process continues."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gymsdk.errors import Failed
from gymsdk.http import client
from gymsdk.models.registry import model
from gymsdk.testing.endpoint import serve
from gymsdk.types import Item

MiB = 2**20
LIMIT = MiB
PROVIDERS = pytest.mark.parametrize("provider", ["endpoint", "openai"])
IDS = list(range(65_536))
LOG_PROBS = [-0.123456] * 65_536
TOKENS = {"generation_token_ids": IDS, "generation_log_probs": LOG_PROBS, "prompt_token_ids": IDS}
MESSAGE = {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "hi"}]}
ANSWER: Item = {"id": "r", "object": "response", "status": "completed", "model": "m", "output": [MESSAGE | TOKENS]}
BODY = client.encode_body(ANSWER)


@asynccontextmanager
async def serve_body(body: bytes, encoding: str | None, status: int = 200) -> AsyncIterator[str]:
    async def handle(request: web.Request) -> web.StreamResponse:
        await request.read()
        headers = {"Content-Type": "application/json"} | ({"Content-Encoding": encoding} if encoding else {})
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        await response.write(body)
        await response.write_eof()
        return response

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    async with serve(application) as url:
        yield url


async def request_response(provider: str, url: str, **options: object) -> Item:
    policy = model(f"{provider}/m", base_url=url, api_key="sk-x", api="responses", retries=2, **options)
    response: Item = await policy.respond({"input": "hi"})
    return response


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    """Check that a test allocates no more than a few times the limit of a response."""
    tracemalloc.start()
    yield
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 24 * MiB


def compress_spaces(bits: int) -> bytes:
    """Return 64 MiB of compressed spaces without allocating the text at once."""
    compressor = zlib.compressobj(wbits=bits)
    return b"".join([*(compressor.compress(b" " * MiB) for _ in range(64)), compressor.flush()])


BOMBS = {
    "gzip": compress_spaces(16 + zlib.MAX_WBITS),
    "gzip in many members": gzip.compress(b" " * MiB) * 64,
    "deflate": compress_spaces(zlib.MAX_WBITS),
}


@PROVIDERS
@pytest.mark.parametrize("encoding", BOMBS)
@pytest.mark.usefixtures("bounded_memory")
async def test_a_decompression_bomb_is_stopped(provider: str, encoding: str) -> None:
    async with serve_body(BOMBS[encoding], encoding.split(maxsplit=1)[0]) as url:
        with pytest.raises(Failed, match=rf"sent a response of more than {LIMIT} bytes, .* raise max_answer") as caught:
            await request_response(provider, url, max_answer=LIMIT)
    assert (caught.value.kind, caught.value.retryable) == ("model_answer_too_large", False)


@PROVIDERS
async def test_an_endless_response_is_stopped_and_not_requested_again(provider: str) -> None:
    sent_bytes = calls = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes, calls
        calls += 1
        await request.read()
        response = web.StreamResponse()
        await response.prepare(request)
        while sent_bytes < 512 * MiB:
            await response.write(b" " * 65_536)
            sent_bytes += 65_536
        return response

    application = web.Application()
    application.router.add_post("/{path:.*}", handle)
    async with serve(application) as url:
        with pytest.raises(Failed) as caught:
            await request_response(provider, url, max_answer=LIMIT)
    assert (caught.value.kind, calls) == ("model_answer_too_large", 1)
    assert sent_bytes < 64 * MiB


@PROVIDERS
async def test_a_response_with_too_many_values_is_rejected_before_they_are_created(provider: str) -> None:
    async with serve_body(b'{"output":[' + b"[]," * 1_100_000 + b"0]}", None) as url:
        with pytest.raises(Failed, match="too many values") as caught:
            await request_response(provider, url)
    assert (caught.value.kind, caught.value.retryable) == ("model_answer_too_large", False)


RAW = zlib.compressobj(wbits=-zlib.MAX_WBITS)
BODIES = {
    "plain": (None, BODY),
    "gzip in two members": ("gzip", gzip.compress(BODY[:1000]) + gzip.compress(BODY[1000:])),
    "gzip with padding": ("gzip", gzip.compress(BODY) + b"\0" * 512),
    "gzip with a zero": ("gzip", gzip.compress(BODY) + b"\0"),
    "deflate": ("deflate", zlib.compress(BODY)),
    "raw deflate": ("deflate", RAW.compress(BODY) + RAW.flush()),
}


@PROVIDERS
@pytest.mark.parametrize("name", BODIES)
async def test_a_long_response_with_token_ids_and_log_probabilities_is_read(provider: str, name: str) -> None:
    encoding, body = BODIES[name]
    async with serve_body(body, encoding) as url:
        [item] = (await request_response(provider, url))["output"]
    assert (item["generation_token_ids"], item["generation_log_probs"]) == (IDS, LOG_PROBS)


@PROVIDERS
@pytest.mark.parametrize(
    ("encoding", "body", "message"),
    [
        ("br", b"x", "the encoding 'br', which the request did not accept"),
        ("gzip", gzip.compress(BODY)[:-100], "ends too early"),
        ("gzip", b"no gzip", "is damaged"),
    ],
    # Each pytest-xdist worker compresses the body itself, and gzip adds the time, so the body cannot be an ID.
    ids=["another encoding", "truncated", "damaged"],
)
async def test_a_response_that_cannot_be_decompressed_is_a_bad_answer(
    provider: str, encoding: str, body: bytes, message: str
) -> None:
    async with serve_body(body, encoding) as url:
        with pytest.raises(Failed, match=message) as caught:
            await request_response(provider, url)
    assert (caught.value.kind, caught.value.retryable) == ("model_bad_answer", True)


@PROVIDERS
@pytest.mark.usefixtures("bounded_memory")
async def test_an_endless_error_response_is_read_up_to_the_limit(provider: str) -> None:
    body = b"it is broken" + b" " * (4 * MiB)
    async with asyncio.timeout(60), serve_body(body, None, status=400) as url:
        with pytest.raises(Failed, match="it is broken") as caught:
            await request_response(provider, url)
    assert caught.value.kind == "model_refused"
