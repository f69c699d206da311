"""Jars: the cookies somebody carries from answer to request, verbatim, by name."""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gymsdk import context, jsonl, large_json
from gymsdk.credentials import redact
from gymsdk.errors import Failed
from gymsdk.http import decompression, errors, tls
from gymsdk.http.tls import redact_url

Resource = TypeVar("Resource", bound=AbstractAsyncContextManager[Any])


class LoopLocal(Generic[Resource]):
    """What *opened* gives, one for each running event loop."""

    def __init__(self, opened: Callable[[], Resource]) -> None:
        self._opened = opened
        self._held: dict[asyncio.AbstractEventLoop, tuple[Resource, AsyncGenerator[None]]] = {}

    async def get(self) -> Resource:
        """Give the running loop's own."""
        loop = asyncio.get_running_loop()
        if loop not in self._held:
            held = self._opened()
            lifetime = self._lifetime(loop, held)
            self._held[loop] = (held, lifetime)
            # A loop closes its unfinished async generators before it ends: nobody else is told that it does.
            await anext(lifetime)
        return self._held[loop][0]

    async def aclose(self) -> None:
        """Close the running loop's own, if it is open."""
        if held := self._held.get(asyncio.get_running_loop()):
            await held[1].aclose()

    async def _lifetime(self, loop: asyncio.AbstractEventLoop, held: Resource) -> AsyncGenerator[None]:
        async with held:
            try:
                yield
            finally:
                del self._held[loop]


CONNECT_TIMEOUT_SECONDS = 10.0
MAX_EXCERPT_CHARS = errors.MAX_EXCERPT_CHARS

IDLE_CONNECTION_SECONDS = 4.0
"""Seconds an idle connection is kept: below the 5 after which many servers close theirs, perhaps under a call."""

MAX_ANSWER_BYTES = 256 * 2**20
"""Bytes that an answer may have after decompression, unless the caller says otherwise."""

MAX_ERROR_BODY_BYTES = 2**20
"""Bytes that are read of an answer with an error status."""

NOT_STARTED_HEADER = "x-gymsdk-not-started"
"""The header of a refusal by a server of ours that has started nothing: the same request may safely be sent again."""

MAX_OVERLOAD_PAUSE_SECONDS = 60.0
"""Seconds that a client waits at most before it sends a refused request again."""

Headers: TypeAlias = Mapping[str, str | SecretStr]
"""What a request carries; no message repeats a secret."""


class NotSent(Failed):
    """Nobody was there to be sent anything."""


class RequestRefused(Failed):
    """A server refused, and blames the parameter *param* of the request, if any."""

    param: str | None = None


class Retry(BaseModel):
    """How often a call is tried again, and how long it waits before: doubling, jittered, bounded."""

    model_config = ConfigDict(frozen=True)

    times: int = Field(4, ge=0)
    first: float = Field(0.5, ge=0)
    longest: float = Field(8.0, ge=0)

    def get_wait_seconds(self, attempt: int) -> float:
        """Seconds to wait after the failed *attempt*, the first being 0."""
        return min(self.longest, self.first * 2.0 ** min(attempt, 60)) * random.uniform(0.5, 1.0)


DEFAULT_RETRY = Retry()

NO_RETRY = Retry(times=0)
"""Not tried again: whoever asks knows better what to do."""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """What a *host* answered, whatever the status; *secrets* are what no message may repeat, *cookies* are verbatim."""

    host: str
    status: int
    body: bytes
    retry_after: float | None = None
    secrets: tuple[SecretStr, ...] = field(default=(), repr=False)
    cookies: Mapping[str, str] = field(default_factory=dict, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        """Whether it is what HTTP calls success."""
        return 200 <= self.status < 300  # noqa: PLR2004 - what HTTP calls success

    @property
    def not_started(self) -> bool:
        """Whether the server was overloaded and started nothing: the request may be sent again, even a POST."""
        return not self.ok and NOT_STARTED_HEADER in self.headers

    @property
    def text(self) -> str:
        """The body as text, the secrets blotted out."""
        return redact(self.body.decode(errors="replace"), self.secrets)

    def json(self) -> Any:
        """Give the parsed body; raises `Failed` where the host refused, or answered something else than JSON."""
        self._check()
        try:
            return large_json.loads(self.body, large_json.get_max_values(len(self.body)))
        except ValueError as error:
            raise self._unread(error) from error

    async def json_async(self) -> Any:
        """Give the parsed body like `json`; a large one is parsed in a thread."""
        self._check()
        try:
            return await large_json.loads_async(self.body, large_json.get_max_values(len(self.body)))
        except ValueError as error:
            raise self._unread(error) from error

    def _check(self) -> None:
        if not self.ok:
            raise build_refusal_error(self.host, self.status, self.text, retry_after=self.retry_after)

    def _unread(self, error: ValueError) -> Failed:
        if isinstance(error, large_json.TooComplex):
            return Failed(f"the answer of {self.host} cannot be read: {error}", kind="model_answer_too_large")
        page = self.body.lstrip()[:1] == b"<"
        hint = "; this is a page for people: check the base URL (it usually ends in /v1)" if page else ""
        message = f"{self.host} answered {self.status} without JSON: {self.text[:MAX_EXCERPT_CHARS]!r}{hint}"
        return Failed(message, kind="model_bad_answer", retryable=not page)


async def post(
    url: str,
    body: object,
    *,
    key: SecretStr | None = None,
    headers: Headers | None = None,
    timeout: float = 600.0,  # noqa: ASYNC109 - it bounds the retries too, and is named in the message
    retry: Retry = DEFAULT_RETRY,
    once: bool = False,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
) -> HttpResponse:
    """Give the answer of *url* to the JSON *body*, retried where that can help, within *timeout* seconds in all.

    An answer of more than *largest* bytes is not read to its end: that is a `Failed` of the kind
    `model_answer_too_large`.

    A body given as bytes is JSON by now. No message repeats the *key*, nor a header that is a secret. An overloaded
    server of ours that has started nothing is asked again as often as there is time for, whatever *retry* says, unless
    that is `ONCE`.
    What is to happen *once* is sent again only where it cannot have arrived.
    It raises `Failed` where there is no answer at all; what a refusal means is for `Answer.json` to say.
    """
    bearer = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else {}
    given = {"Content-Type": "application/json", **bearer, **(headers or {})}
    attempt = partial(_send, "POST", url, encode_body(body), given, tuple(filter(None, [key])), max_answer_bytes)
    return await _send_until_deadline(url, attempt, timeout, retry, once=once)


async def get(
    url: str,
    *,
    headers: Headers | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109 - it bounds the retries too, and is named in the message
    retry: Retry = DEFAULT_RETRY,
) -> HttpResponse:
    """Give what is at *url*, like `post`."""
    return await _send_until_deadline(url, partial(_send, "GET", url, None, headers or {}), timeout, retry)


async def put(
    url: str,
    body: object,
    *,
    headers: Headers | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109 - it bounds the retries too, and is named in the message
    retry: Retry = DEFAULT_RETRY,
) -> HttpResponse:
    """Give the answer of *url* to the JSON *body* put there, like `post`."""
    given = {"Content-Type": "application/json", **(headers or {})}
    return await _send_until_deadline(url, partial(_send, "PUT", url, encode_body(body), given), timeout, retry)


async def delete(
    url: str,
    *,
    headers: Headers | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109 - it bounds the retries too, and is named in the message
    retry: Retry = DEFAULT_RETRY,
) -> HttpResponse:
    """Give the answer of *url* as what is there is deleted, like `post`."""
    return await _send_until_deadline(url, partial(_send, "DELETE", url, None, headers or {}), timeout, retry)


async def _send_until_deadline(
    url: str, attempt: Callable[[], Awaitable[HttpResponse]], seconds: float, retry: Retry, *, once: bool = False
) -> HttpResponse:
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        async with asyncio.timeout_at(deadline):
            return await _send_with_retries(attempt, retry, deadline, once=once)
    except TimeoutError as error:
        raise build_timeout_error(get_host(url), seconds) from error


async def aclose() -> None:
    """Close the running loop's session now rather than with the loop."""
    await _sessions.aclose()


def get_host(url: str) -> str:
    """The host and port of *url*, without who asks."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2]


def build_refusal_error(host: str, status: int, text: str, *, retry_after: float | None = None) -> Failed:
    """The failure that an answer with this *status* means."""
    retryable = is_retryable_status(status)
    kind = errors.FAILURE_KINDS.get(status, "model_error" if retryable else "model_refused")
    said, param = errors.parse_refusal(text)
    words = ": ".join(filter(None, (f"{host} answered {status}", said)))
    refused = RequestRefused(
        words + errors.get_status_hint(status),
        kind=kind,
        retryable=retryable,
        retry_after=retry_after if retryable else None,
    )
    refused.param = param
    return refused


def build_unreachable_error(host: str, error: Exception, kind: type[Failed] = Failed) -> Failed:
    """The failure to connect to *host*."""
    return kind(
        f"cannot reach {host}: {errors.describe_connect_error(error)}", kind="model_unreachable", retryable=True
    )


def build_interrupted_error(host: str, error: Exception) -> Failed:
    """The failure of *host* to answer to the end."""
    message = f"{host} broke off its answer: {errors.describe_interruption(error)}"
    return Failed(message, kind="model_unreachable", retryable=True)


def build_timeout_error(host: str, timeout: float) -> Failed:
    """The failure of *host* to answer in time."""
    message = f"{host} did not answer within {timeout:g} s; raise the timeout or lower the load"
    return Failed(message, kind="model_timeout", retryable=True)


def is_retryable_status(status: int) -> bool:
    """Whether the same request may be answered otherwise another time."""
    # What a server has not implemented, it will not have another time.
    return status in {408, 409, 429} or (status >= 500 and status != 501)  # noqa: PLR2004 - the server's own errors


def _create_session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_SECONDS),
        # It would decompress whatever comes at once; `read` bounds it.
        auto_decompress=False,
    )


_sessions = LoopLocal(_create_session)


async def _send_with_retries(
    attempt: Callable[[], Awaitable[HttpResponse]], retry: Retry, deadline: float, *, once: bool
) -> HttpResponse:
    """The first answer that settles it, or the last one there is time for."""
    loop = asyncio.get_running_loop()
    if retry.times:
        attempt = partial(retry_while_overloaded, attempt, deadline)
    for number in range(retry.times):
        wait = retry.get_wait_seconds(number)
        try:
            answer = await attempt()
        except Failed as error:
            if not error.retryable or loop.time() + wait >= deadline or (once and not isinstance(error, NotSent)):
                raise
        else:
            wait += answer.retry_after or 0.0
            if once or not is_retryable_status(answer.status) or loop.time() + wait >= deadline:
                return answer
        await asyncio.sleep(wait)
    return await attempt()


async def retry_while_overloaded(attempt: Callable[[], Awaitable[HttpResponse]], deadline: float) -> HttpResponse:
    """Repeat *attempt* while an overloaded server refuses to start it and the pause it asks for ends by *deadline*."""
    loop = asyncio.get_running_loop()
    while (answer := await attempt()).not_started:
        pause = get_overload_pause(answer.retry_after)
        if loop.time() + pause >= deadline:
            break
        await asyncio.sleep(pause)
    return answer


def get_overload_pause(retry_after: float | None) -> float:
    """Return the seconds to wait for an overloaded server, jittered so that its clients do not all return at once."""
    return min(MAX_OVERLOAD_PAUSE_SECONDS, max(0.1, retry_after or 1.0)) * random.uniform(1.0, 1.5)


async def _send(
    method: str,
    url: str,
    data: bytes | None,
    given: Headers,
    secrets: tuple[SecretStr, ...] = (),
    largest: int = MAX_ANSWER_BYTES,
) -> HttpResponse:
    session = await _sessions.get()
    told = {name: each.get_secret_value() if isinstance(each, SecretStr) else each for name, each in given.items()}
    headers = {"Accept-Encoding": decompression.ACCEPT_ENCODING, **context.build_context_headers(), **told}
    hidden = [name for name, each in given.items() if isinstance(each, SecretStr)]
    secrets += tuple(SecretStr(headers[name].removeprefix("Bearer ")) for name in hidden)
    try:
        # A redirected POST would arrive as a GET, perhaps elsewhere, with the key.
        async with session.request(
            method, url, data=data, headers=headers, allow_redirects=False, ssl=tls.get_ssl_for_url(url)
        ) as answer:
            return HttpResponse(
                get_host(url),
                answer.status,
                await read_body(answer.content.iter_any(), get_host(url), answer.status, answer.headers, largest),
                parse_retry_after(answer.headers.get("Retry-After")),
                secrets,
                {name: morsel.coded_value for name, morsel in answer.cookies.items()},
                answer.headers,
            )
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError) as error:
        raise Failed(f"{redact_url(url)[:MAX_EXCERPT_CHARS]!r} is no URL of a server", kind="model_refused") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise tls.build_untrusted_error(get_host(url), error.certificate_error) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise build_unreachable_error(get_host(url), error, NotSent) from error
    except (aiohttp.ClientError, OSError) as error:
        raise build_interrupted_error(get_host(url), error) from error


async def read_body(
    chunks: AsyncIterable[bytes], host: str, status: int, headers: Mapping[str, str], max_answer_bytes: int
) -> bytes:
    """Give the body of an answer, decompressed, as its *chunks* arrive.

    Of an error's body, the first MiB is enough; a larger one is truncated.

    Raises:
        Failed: It has more than *largest* bytes after decompression, or cannot be decompressed.
    """
    refused = status >= 400  # noqa: PLR2004 - what HTTP calls an error
    most = min(max_answer_bytes, MAX_ERROR_BODY_BYTES) if refused else max_answer_bytes
    try:
        return await decompression.decompress_chunks(
            chunks, headers.get("Content-Encoding", ""), most, truncate=refused
        )
    except decompression.TooLarge:
        message = (
            f"{host} sent more than {max_answer_bytes} bytes for one answer, counted after decompression, and was cut off; check"
            " what it serves, lower max_output_tokens, or raise max_answer of the model"
        )
        raise Failed(message, kind="model_answer_too_large") from None
    except decompression.BadEncoding as error:
        message = f"the answer of {host} cannot be decompressed: {error}"
        raise Failed(message, kind="model_bad_answer", retryable=True) from None


def encode_body(body: object) -> bytes:
    """Give *body* as JSON; bytes are JSON by now."""
    if isinstance(body, bytes):
        return body
    try:
        return jsonl.dump_portable_json(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise Failed(f"the request cannot be written as JSON: {error}", kind="model_bad_request") from error


def parse_retry_after(header: str | None) -> float | None:
    """The seconds a Retry-After *header* asks for: a number, or the time until a date."""
    if not header:
        return None
    try:
        return max(0.0, float(header)) if math.isfinite(float(header)) else None
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # a date without a zone cannot be compared
        return None


Cookies: TypeAlias = dict[str, str]
"""Cookies by name."""

COOKIE_NAME_PATTERN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
COOKIE_VALUE_PATTERN = re.compile(r"[\x21-\x3a\x3c-\x7e]*")
"""What a cookie may be called and may hold, so that it splits neither a header nor a request."""


def parse_cookies(header: str | None) -> Cookies:
    """Give the cookies of a request's Cookie *header*."""
    pairs = (pair.strip().partition("=") for pair in (header or "").split(";"))
    return filter_cookies({name: value for name, _, value in pairs})


def filter_cookies(jar: Mapping[str, object]) -> Cookies:
    """Give those of a *jar* from elsewhere that can be sent."""
    return {
        name: value
        for name, value in jar.items()
        if COOKIE_NAME_PATTERN.fullmatch(name) and isinstance(value, str) and COOKIE_VALUE_PATTERN.fullmatch(value)
    }


def build_cookie_header(jar: Mapping[str, str]) -> dict[str, str]:
    """Give the headers of a request that carries *jar*."""
    return {"Cookie": "; ".join(f"{name}={value}" for name, value in jar.items())} if jar else {}
