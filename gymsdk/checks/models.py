"""Check that the adapter of a model keeps to the contract of `gymsdk.types.Model`."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from gymsdk.checks.report import Finding, NotApplicable, Result
from gymsdk.errors import BadModelOption, EpisodeError, Failed, UsageError, describe_exception
from gymsdk.jsonl import copy_json, dump_json
from gymsdk.models import registry as models
from gymsdk.plugins import registry
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS, parse_actions, query_model
from gymsdk.types import Item, Model

CHECK_SECONDS = 120.0
"""The time limit of one check."""

CANCEL_SECONDS = 5.0
"""Seconds in which a cancelled call must end."""

CLOSE_SECONDS = 10.0
"""Seconds in which `aclose` must end."""

REQUEST_SECONDS = 5.0
"""The time limit of a call to a server of the checks."""

CONCURRENT_CALLS = 8

KEY = "sk-key-of-the-check-1234567890"
"""The API key for the servers of the checks, which repeat it in their errors."""

NOT_FOR_PROBES = frozenset({"no_episode", "not_recorded"})
"""The kinds of failures of policies that answer the requests of their own environment only."""

QUESTION: Item = {"role": "user", "content": "Write one word."}
REQUEST: Item = {"input": [QUESTION], "max_output_tokens": 32}

ANSWERS: tuple[tuple[int, bytes, bool | None], ...] = (
    (400, b'{"error": {"message": "bad request of %b", "type": "invalid_request_error"}}', False),
    (401, b'{"error": {"message": "wrong key %b"}}', False),
    (429, b'{"error": {"message": "slow down, %b"}}', True),
    (500, b'{"error": {"message": "broken, %b"}}', True),
    (200, b"no JSON, %b", None),
)
"""The answers of a server with errors: the status, the body with the key, and whether another try may help."""


class ModelSubject:
    """The model that is checked.

    Args:
        name: The name of the model, `provider/name`.

    Attributes:
        entry: The metadata of its provider.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.entry = registry.find_entry(registry.MODELS, name.partition("/")[0])

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Model]:
        """Build the model with *options*, and close it at the end."""
        model = models.model(self.name, **options)
        try:
            yield model
        finally:
            if close := getattr(model, "aclose", None):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await close()

    @asynccontextmanager
    async def open_at(self, url: str, **options: Any) -> AsyncIterator[Model]:
        """Build the model for the server at *url*; raises `NotApplicable` if its provider takes no address."""
        name = self.name.partition("@http")[0]
        # Without retries: each answer of the server must reach the check as an error.
        options |= {"base_url": url, "api_key": KEY, "timeout": REQUEST_SECONDS, "retries": 0}
        # Built apart from its use, in which the same exception would be an error of the adapter.
        try:
            models.model(name, **options)
        except BadModelOption as error:
            raise NotApplicable(f"the model takes no address, so no server of the check can fail: {error}") from None
        async with ModelSubject(name).open(**options) as model:
            yield model


CheckFunction = Callable[[ModelSubject], Awaitable[list[Finding]]]


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """One check of a model; the attributes are those of `gymsdk.checks.report.Check`."""

    id: str
    requirement: str
    why: str
    fix: str
    run: CheckFunction


class ModelReport(BaseModel):
    """The results of all checks of one model."""

    model_config = ConfigDict(frozen=True)

    model: str
    distribution: str
    version: str
    results: list[Result]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(result.status != "failed" for result in self.results)


def build_report(subject: ModelSubject, results: list[Result]) -> ModelReport:
    """Build the report on *subject* from *results*."""
    entry = subject.entry
    return ModelReport(
        model=subject.name,
        distribution=entry.distribution if entry else "",
        version=entry.version if entry else "",
        results=results,
    )


async def iter_results(subject: ModelSubject, checks: Iterable[ModelCheck]) -> AsyncIterator[Result]:
    """Yield the result of each check as it ends.

    Raises:
        UsageError: The model cannot be built.
    """
    models.model(subject.name)
    for check in checks:
        yield await run_check(check, subject)


async def run_check(check: ModelCheck, subject: ModelSubject) -> Result:
    """Run *check* and return its result; an error of the adapter becomes a finding."""
    started = time.perf_counter()
    findings: list[Finding] = []
    reason = ""
    try:
        async with asyncio.timeout(CHECK_SECONDS):
            findings = await check.run(subject)
    except NotApplicable as error:
        reason = str(error)
    except EpisodeError as error:
        if error.kind in NOT_FOR_PROBES:
            reason = str(error)
        else:
            findings = [Finding(problem=f"a call failed as {error.kind}: {error}")]
    except TimeoutError:
        findings = [Finding(problem=f"the check did not end within {CHECK_SECONDS:g} seconds, or `aclose` hangs")]
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # an error of one check must not stop the others
        findings = [Finding(problem=f"the adapter raised {describe_exception(error)}")]
    return Result(
        id=check.id,
        requirement=check.requirement,
        status="skipped" if reason else "failed" if findings else "passed",
        why=check.why if findings else "",
        fix=check.fix if findings else "",
        findings=findings,
        reason=reason,
        seconds=round(time.perf_counter() - started, 3),
    )


# Answers


async def _check_respond(subject: ModelSubject) -> list[Finding]:
    async with subject.open() as model:
        request = copy_json(REQUEST)
        response = await query_model(model, request, episode=None)
        problems = [*_find_response_problems(response)]
        if request != REQUEST:
            problems.append("`respond` changes its request, which belongs to the caller")
        if not problems:
            follow_up = {**REQUEST, "input": [QUESTION, *response["output"], {"role": "user", "content": "Another."}]}
            second = await query_model(model, follow_up, episode=None)
            problems += (f"in the second turn, {problem}" for problem in _find_response_problems(second))
            calls = (query_model(model, copy_json(REQUEST), episode=None) for _ in range(CONCURRENT_CALLS))
            answers = await asyncio.gather(*calls, return_exceptions=True)
            failures = [answer for answer in answers if isinstance(answer, BaseException)]
            if failures:
                problems.append(f"{len(failures)} of {CONCURRENT_CALLS} concurrent calls failed: {failures[0]}")
            elif len({id(answer) for answer in answers}) < CONCURRENT_CALLS:
                problems.append("concurrent calls get one object as their response; a change to one changes all")
    return [Finding(problem=problem) for problem in problems]


def _find_response_problems(response: Item) -> Iterable[str]:
    try:
        dump_json(response)
    except (TypeError, ValueError) as error:
        yield f"the response is not plain JSON: {error}"
        return
    try:
        parse_actions(response["output"])
    except EpisodeError as error:
        yield f"the output cannot be read: {error}"
    usage = response.get("usage") or {}
    names = ("input_tokens", "output_tokens", "total_tokens")
    if not isinstance(usage, dict) or any(not isinstance(usage.get(name), int | None) for name in names):
        yield f"the usage is not the numbers {', '.join(names)}: {usage}"


# Errors


async def _check_errors(subject: ModelSubject) -> list[Finding]:
    async with subject.open() as model:
        problems = [await _find_error_problem(model, {**REQUEST, "input": []}, "a request without a message")]
    try:
        problems += await _find_server_error_problems(subject)
    except NotApplicable:
        if not any(problems):
            raise
    return [Finding(problem=problem) for problem in filter(None, problems)]


async def _find_server_error_problems(subject: ModelSubject) -> list[str]:
    problems = []
    async with _serve(None) as url:
        pass
    async with subject.open_at(url) as model:
        problems.append(await _find_error_problem(model, REQUEST, "no server at the address", retryable=True))
    for status, body, retryable in ANSWERS:
        async with _serve((status, body.replace(b"%b", KEY.encode()))) as url, subject.open_at(url) as model:
            what = f"the answer {status} {'with an error' if status > 200 else 'that is no JSON'}"  # noqa: PLR2004
            problems.append(await _find_error_problem(model, REQUEST, what, retryable=retryable, must_fail=True))
    return problems


async def _find_error_problem(
    model: Model, request: Item, what: str, *, retryable: bool | None = None, must_fail: bool = False
) -> str:
    """Return how the error of a call breaks the contract, empty if it does not.

    Args:
        model: The model.
        request: The request.
        what: The fault of the request or the server, for the message.
        retryable: Whether another try may help; `None` allows both.
        must_fail: Whether a response is an error, too.
    """
    try:
        await model.respond(copy_json(request))
    except Failed as error:
        if KEY in str(error):
            return f"{what}: the message of the failure contains the API key"
        if not str(error) or not error.kind:
            return f"{what}: the failure has no message or no kind"
        if retryable is not None and error.retryable != retryable:
            expected = "may be tried again" if retryable else "stays wrong when it is tried again"
            return f"{what}: the failure says retryable={error.retryable}, and the call {expected}"
        return ""
    except Exception as error:  # noqa: BLE001  # the finding
        return f"{what}: `respond` raises {type(error).__name__} instead of gymsdk.Failed: {error}"
    return f"{what}: `respond` returns a response" if must_fail else ""


# Token ids


async def _check_token_ids(subject: ModelSubject) -> list[Finding]:
    try:
        models.model(subject.name, tokens=True)
    except BadModelOption as error:
        raise NotApplicable(f"the model has no token ids: {error}") from None
    async with subject.open(tokens=True) as model:
        first = await query_model(model, copy_json(REQUEST), episode=None)
        problems = [*_find_token_problems(first["output"])]
        if not problems:
            follow_up = {**REQUEST, "input": [QUESTION, *first["output"], {"role": "user", "content": "Another."}]}
            second = await query_model(model, copy_json(follow_up), episode=None)
            problems = [*_find_token_problems(second["output"])] or [*_find_chain_problems(first, second)]
    return [Finding(problem=problem) for problem in problems]


def _find_token_problems(output: Sequence[Item]) -> Iterable[str]:
    if not output:
        yield "a response with token ids has no item to carry them"
        return
    prompt, ids, logprobs = (_read_numbers(output[-1].get(name)) for name in TOKEN_FIELDS)
    if not prompt or ids is None or not all(isinstance(token, int) for token in [*prompt, *ids]):
        yield f"the last item has no lists of ids in {TOKEN_FIELDS[0]} and {TOKEN_FIELDS[1]}"
    elif logprobs is None or len(logprobs) != len(ids):
        yield f"{TOKEN_FIELDS[2]} does not have one number for each of the {len(ids)} sampled ids"
    elif wrong := [value for value in logprobs if not math.isfinite(value) or value > 0]:
        yield f"the log-probability {wrong[0]} is no logarithm of a probability"


def _find_chain_problems(first: Item, second: Item) -> Iterable[str]:
    carrier, following = first["output"][-1], second["output"][-1]
    expected = [*carrier[TOKEN_FIELDS[0]], *carrier[TOKEN_FIELDS[1]]]
    if following[TOKEN_FIELDS[0]][: len(expected)] != expected and not following.get(BROKEN_FIELD):
        yield f"the prompt of the second turn does not continue the ids of the first, and has no {BROKEN_FIELD}"


def _read_numbers(value: object) -> list[float] | None:
    is_numbers = isinstance(value, list) and all(isinstance(member, (int, float)) for member in value)
    return value if is_numbers else None  # type: ignore[return-value]  # a list of numbers


# Cancellation and close


async def _check_cancel(subject: ModelSubject) -> list[Finding]:
    try:
        async with _serve(None) as url, subject.open_at(url) as model:
            problem = await _find_cancel_problem(model, REQUEST_SECONDS / 10)
    except NotApplicable:
        async with subject.open() as model:
            problem = await _find_cancel_problem(model, 0.0)
            await query_model(model, copy_json(REQUEST), episode=None)
    return [Finding(problem=problem)] if problem else []


async def _find_cancel_problem(model: Model, seconds: float) -> str:
    """Cancel a call after *seconds*, and return how its end breaks the contract, empty if it does not."""
    calling = asyncio.ensure_future(model.respond(copy_json(REQUEST)))
    await asyncio.sleep(seconds)
    if calling.done():
        calling.exception()
        return ""
    calling.cancel()
    await asyncio.wait({calling}, timeout=CANCEL_SECONDS)
    if not calling.done():
        return f"a cancelled call has not ended after {CANCEL_SECONDS:g} seconds"
    if calling.cancelled():
        return ""
    error = calling.exception()
    ended = f"raises {type(error).__name__}" if error else "returns a response"
    return f"a cancelled call {ended} instead of CancelledError"


async def _check_close(subject: ModelSubject) -> list[Finding]:
    before = asyncio.all_tasks()
    model = models.model(subject.name)
    close = getattr(model, "aclose", None)
    if close is None:
        raise NotApplicable("the model has no `aclose`, so it must hold nothing that needs to be closed")
    # A failed call is reported by `model.respond`, and may leave something open, too.
    with suppress(Failed):
        await query_model(model, copy_json(REQUEST), episode=None)
    problems = []
    for call in ("the first", "a second"):
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await close()
        except TimeoutError:
            problems.append(f"{call} `aclose` has not ended after {CLOSE_SECONDS:g} seconds")
        except Exception as error:  # noqa: BLE001  # the finding
            problems.append(f"{call} `aclose` raises {describe_exception(error)}")
    await asyncio.sleep(0.1)
    left = [task.get_name() for task in asyncio.all_tasks() - before]
    if left and not problems:
        problems.append(f"after `aclose` a task still runs: {left[0]}")
    return [Finding(problem=problem) for problem in problems]


@asynccontextmanager
async def _serve(answer: tuple[int, bytes] | None) -> AsyncIterator[str]:
    """Serve HTTP on a port of this machine: *answer* to each request, or nothing at all; yield the base URL."""
    writers: set[asyncio.StreamWriter] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        head = await reader.readuntil(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        await reader.readexactly(int(lengths[0].partition(b":")[2]) if lengths else 0)
        if answer is not None:
            status, body = answer
            fields = b"Content-Type: application/json\r\nContent-Length: %d\r\nConnection: close" % len(body)
            writer.write(b"HTTP/1.1 %d Status\r\n%b\r\n\r\n%b" % (status, fields, body))
            writer.close()

    async def handle_until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handle(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            # The adapter closed its connection, as after a cancelled call.
            writer.close()

    server = await asyncio.start_server(handle_until_closed, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        for writer in writers:
            writer.close()


CHECKS = (
    ModelCheck(
        "model.respond",
        "A request is answered with a Response, in each turn and for several calls at once.",
        "everything else reads the response: the episode, its transcript and its usage",
        "return a Response object as plain JSON, as `gymsdk.responses.build_response` builds it",
        _check_respond,
    ),
    ModelCheck(
        "model.errors",
        "A call without an answer raises `gymsdk.Failed`, which says whether another try may help.",
        "any other exception hides the cause, and a wrong `retryable` repeats hopeless calls or gives up too early",
        "raise Failed(message, kind='model_…', retryable=…), without the key in the message",
        _check_errors,
    ),
    ModelCheck(
        "model.token_ids",
        "With `tokens`, each response has the ids of its prompt and of its tokens, with their log-probabilities.",
        "a trainer trains on these ids, and wrong ones train another policy without an error",
        f"put {', '.join(TOKEN_FIELDS)} on the last item; refuse `tokens` with BadModelOption if there are none",
        _check_token_ids,
    ),
    ModelCheck(
        "model.cancel",
        "A cancelled call ends at once with CancelledError.",
        "the deadline of an episode and the end of a run cancel calls",
        "do not catch asyncio.CancelledError, or raise it again",
        _check_cancel,
    ),
    ModelCheck(
        "model.close",
        "`aclose` ends, may be called twice, and leaves no task behind.",
        "a model that stays open keeps connections, and can keep a command from its end",
        "close clients and cancel tasks in `aclose`, and do nothing the second time",
        _check_close,
    ),
)
"""Every check of a model."""
