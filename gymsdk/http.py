"""The one outbound client: a JSON body posted, a page got, and its answer, or a `Failed` that says why there is none.

Sessions are shared: one for each running event loop, opened on first use and closed with the loop.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeAlias

import aiohttp
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from gymsdk import decompression, large_json, reasons, rows, trail, trust
from gymsdk.addresses import public
from gymsdk.discretion import blotted
from gymsdk.errors import Failed
from gymsdk.perloop import PerLoop

CONNECT_TIMEOUT = 10.0
EXCERPT = reasons.EXCERPT

IDLE = 4.0
"""Seconds an idle connection is kept: below the 5 after which many servers close theirs, perhaps under a call."""

LARGEST = 256 * 2**20
"""Bytes that an answer may have after decompression, unless the caller says otherwise."""

LARGEST_REFUSAL = 2**20
"""Bytes that are read of an answer with an error status."""

NOT_STARTED = "x-gymsdk-not-started"
"""The header of a refusal by a server of ours that has started nothing: the same request may safely be sent again."""

LONGEST_PAUSE = 60.0
"""Seconds that a client waits at most before it sends a refused request again."""

Headers: TypeAlias = Mapping[str, str | SecretStr]
"""What a request carries; no message repeats a secret."""


class Unsent(Failed):
    """Nobody was there to be sent anything."""


class Refused(Failed):
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


RETRY = Retry()

ONCE = Retry(times=0)
"""Not tried again: whoever asks knows better what to do."""


@dataclass(frozen=True, slots=True)
class Answer:
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
        return not self.ok and NOT_STARTED in self.headers

    @property
    def text(self) -> str:
        """The body as text, the secrets blotted out."""
        return blotted(self.body.decode(errors="replace"), self.secrets)

    def json(self) -> Any:
        """Give the parsed body; raises `Failed` where the host refused, or answered something else than JSON."""
        self._check()
        try:
            return large_json.loads(self.body, large_json.values_for(len(self.body)))
        except ValueError as error:
            raise self._unread(error) from error

    async def json_async(self) -> Any:
        """Give the parsed body like `json`; a large one is parsed in a thread."""
        self._check()
        try:
            return await large_json.loaded(self.body, large_json.values_for(len(self.body)))
        except ValueError as error:
            raise self._unread(error) from error

    def _check(self) -> None:
        if not self.ok:
            raise refusal(self.host, self.status, self.text, retry_after=self.retry_after)

    def _unread(self, error: ValueError) -> Failed:
        if isinstance(error, large_json.TooComplex):
            return Failed(f"the answer of {self.host} cannot be read: {error}", kind="model_answer_too_large")
        page = self.body.lstrip()[:1] == b"<"
        hint = "; this is a page for people: check the base URL (it usually ends in /v1)" if page else ""
        message = f"{self.host} answered {self.status} without JSON: {self.text[:EXCERPT]!r}{hint}"
        return Failed(message, kind="model_bad_answer", retryable=not page)


async def post(
    url: str,
    body: object,
    *,
    key: SecretStr | None = None,
    headers: Headers | None = None,
    timeout: float = 600.0,  # noqa: ASYNC109 - it bounds the retries too, and is named in the message
    retry: Retry = RETRY,
    once: bool = False,
    max_answer_bytes: int = LARGEST,
) -> Answer:
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
    attempt = partial(_send, "POST", url, written(body), given, tuple(filter(None, [key])), max_answer_bytes)
    return await _in_time(url, attempt, timeout, retry, once=once)


async def get(
    url: str,
    *,
    headers: Headers | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109 - it bounds the retries too, and is named in the message
    retry: Retry = RETRY,
) -> Answer:
    """Give what is at *url*, like `post`."""
    return await _in_time(url, partial(_send, "GET", url, None, headers or {}), timeout, retry)


async def put(
    url: str,
    body: object,
    *,
    headers: Headers | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109 - it bounds the retries too, and is named in the message
    retry: Retry = RETRY,
) -> Answer:
    """Give the answer of *url* to the JSON *body* put there, like `post`."""
    given = {"Content-Type": "application/json", **(headers or {})}
    return await _in_time(url, partial(_send, "PUT", url, written(body), given), timeout, retry)


async def delete(
    url: str,
    *,
    headers: Headers | None = None,
    timeout: float = 60.0,  # noqa: ASYNC109 - it bounds the retries too, and is named in the message
    retry: Retry = RETRY,
) -> Answer:
    """Give the answer of *url* as what is there is deleted, like `post`."""
    return await _in_time(url, partial(_send, "DELETE", url, None, headers or {}), timeout, retry)


async def _in_time(
    url: str, attempt: Callable[[], Awaitable[Answer]], seconds: float, retry: Retry, *, once: bool = False
) -> Answer:
    deadline = asyncio.get_running_loop().time() + seconds
    try:
        async with asyncio.timeout_at(deadline):
            return await _insist(attempt, retry, deadline, once=once)
    except TimeoutError as error:
        raise late(host(url), seconds) from error


async def aclose() -> None:
    """Close the running loop's session now rather than with the loop."""
    await _sessions.aclose()


def host(url: str) -> str:
    """The host and port of *url*, without who asks."""
    return url.partition("://")[2].partition("/")[0].rpartition("@")[2]


def refusal(host: str, status: int, text: str, *, retry_after: float | None = None) -> Failed:
    """The failure that an answer with this *status* means."""
    retryable = worth_retrying(status)
    kind = reasons.KINDS.get(status, "model_error" if retryable else "model_refused")
    said, param = reasons.refusal(text)
    words = ": ".join(filter(None, (f"{host} answered {status}", said)))
    refused = Refused(
        words + reasons.hint(status), kind=kind, retryable=retryable, retry_after=retry_after if retryable else None
    )
    refused.param = param
    return refused


def unreachable(host: str, error: Exception, kind: type[Failed] = Failed) -> Failed:
    """The failure to connect to *host*."""
    return kind(f"cannot reach {host}: {reasons.unsent(error)}", kind="model_unreachable", retryable=True)


def cut(host: str, error: Exception) -> Failed:
    """The failure of *host* to answer to the end."""
    message = f"{host} broke off its answer: {reasons.broken(error)}"
    return Failed(message, kind="model_unreachable", retryable=True)


def late(host: str, timeout: float) -> Failed:
    """The failure of *host* to answer in time."""
    message = f"{host} did not answer within {timeout:g} s; raise the timeout or lower the load"
    return Failed(message, kind="model_timeout", retryable=True)


def worth_retrying(status: int) -> bool:
    """Whether the same request may be answered otherwise another time."""
    # What a server has not implemented, it will not have another time.
    return status in {408, 409, 429} or (status >= 500 and status != 501)  # noqa: PLR2004 - the server's own errors


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
        # It would decompress whatever comes at once; `read` bounds it.
        auto_decompress=False,
    )


_sessions = PerLoop(_session)


async def _insist(attempt: Callable[[], Awaitable[Answer]], retry: Retry, deadline: float, *, once: bool) -> Answer:
    """The first answer that settles it, or the last one there is time for."""
    loop = asyncio.get_running_loop()
    if retry.times:
        attempt = partial(admitted, attempt, deadline)
    for number in range(retry.times):
        wait = retry.get_wait_seconds(number)
        try:
            answer = await attempt()
        except Failed as error:
            if not error.retryable or loop.time() + wait >= deadline or (once and not isinstance(error, Unsent)):
                raise
        else:
            wait += answer.retry_after or 0.0
            if once or not worth_retrying(answer.status) or loop.time() + wait >= deadline:
                return answer
        await asyncio.sleep(wait)
    return await attempt()


async def admitted(attempt: Callable[[], Awaitable[Answer]], deadline: float) -> Answer:
    """Repeat *attempt* while an overloaded server refuses to start it and the pause it asks for ends by *deadline*."""
    loop = asyncio.get_running_loop()
    while (answer := await attempt()).not_started:
        pause = pause_for(answer.retry_after)
        if loop.time() + pause >= deadline:
            break
        await asyncio.sleep(pause)
    return answer


def pause_for(retry_after: float | None) -> float:
    """Return the seconds to wait for an overloaded server, jittered so that its clients do not all return at once."""
    return min(LONGEST_PAUSE, max(0.1, retry_after or 1.0)) * random.uniform(1.0, 1.5)


async def _send(
    method: str,
    url: str,
    data: bytes | None,
    given: Headers,
    secrets: tuple[SecretStr, ...] = (),
    largest: int = LARGEST,
) -> Answer:
    session = await _sessions.get()
    told = {name: each.get_secret_value() if isinstance(each, SecretStr) else each for name, each in given.items()}
    headers = {"Accept-Encoding": decompression.ACCEPTED, **trail.headers(), **told}
    hidden = [name for name, each in given.items() if isinstance(each, SecretStr)]
    secrets += tuple(SecretStr(headers[name].removeprefix("Bearer ")) for name in hidden)
    try:
        # A redirected POST would arrive as a GET, perhaps elsewhere, with the key.
        async with session.request(
            method, url, data=data, headers=headers, allow_redirects=False, ssl=trust.of(url)
        ) as answer:
            return Answer(
                host(url),
                answer.status,
                await read(answer.content.iter_any(), host(url), answer.status, answer.headers, largest),
                seconds(answer.headers.get("Retry-After")),
                secrets,
                {name: morsel.coded_value for name, morsel in answer.cookies.items()},
                answer.headers,
            )
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, UnicodeError) as error:
        raise Failed(f"{public(url)[:EXCERPT]!r} is no URL of a server", kind="model_refused") from error
    except aiohttp.ClientConnectorCertificateError as error:
        raise trust.refused(host(url), error.certificate_error) from error
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise unreachable(host(url), error, Unsent) from error
    except (aiohttp.ClientError, OSError) as error:
        raise cut(host(url), error) from error


async def read(chunks: AsyncIterable[bytes], host: str, status: int, headers: Mapping[str, str], max_answer_bytes: int) -> bytes:
    """Give the body of an answer, decompressed, as its *chunks* arrive.

    Of an error's body, the first MiB is enough; a larger one is truncated.

    Raises:
        Failed: It has more than *largest* bytes after decompression, or cannot be decompressed.
    """
    refused = status >= 400  # noqa: PLR2004 - what HTTP calls an error
    most = min(max_answer_bytes, LARGEST_REFUSAL) if refused else max_answer_bytes
    try:
        return await decompression.collected(chunks, headers.get("Content-Encoding", ""), most, truncate=refused)
    except decompression.TooLarge:
        message = (
            f"{host} sent more than {max_answer_bytes} bytes for one answer, counted after decompression, and was cut off; check"
            " what it serves, lower max_output_tokens, or raise max_answer of the model"
        )
        raise Failed(message, kind="model_answer_too_large") from None
    except decompression.BadEncoding as error:
        message = f"the answer of {host} cannot be decompressed: {error}"
        raise Failed(message, kind="model_bad_answer", retryable=True) from None


def written(body: object) -> bytes:
    """Give *body* as JSON; bytes are JSON by now."""
    if isinstance(body, bytes):
        return body
    try:
        return rows.written(body)
    except (TypeError, ValueError, RecursionError) as error:
        raise Failed(f"the request cannot be written as JSON: {error}", kind="model_bad_request") from error


def seconds(header: str | None) -> float | None:
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
