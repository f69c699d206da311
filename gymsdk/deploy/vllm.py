"""Launch vLLM for a model, wait until it is ready, and stop it with this process."""

from __future__ import annotations

import asyncio
import io
import os
import re
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TextIO

from pydantic import SecretStr

from gymsdk.cluster.reports import Exit
from gymsdk.deploy import vllm_command
from gymsdk.deploy.supervisor import USAGE_EXIT_CODE, ProcessSpec, Supervisor, describe_exit
from gymsdk.deploy.vllm_command import Launch
from gymsdk.edge.addresses import bind_socket
from gymsdk.errors import Failed, GymsdkError, UsageError
from gymsdk.http import client
from gymsdk.http.tls import get_reachable_host
from gymsdk.interpreter import SAFE_PATH

MAX_KEPT_LINES = 2000
"""How many lines of output are kept: the cause of an exit is well before the last line."""

MAX_SHOWN_LINES = 6
"""How many lines of output an error message shows."""

ADVICE_BY_PATTERN = (
    (
        "invalid tool call parser",
        "this vLLM has no such tool call parser; choose one that it lists with -- --tool-call-parser NAME",
    ),
    (
        "CUDA out of memory|HIP out of memory|torch.OutOfMemoryError",
        "the GPU has too little memory for the model; lower -- --max-model-len N or --gpu-memory-utilization SHARE",
    ),
    (
        "No available memory for the cache blocks|larger than the available KV cache",
        "the weights leave too little memory; raise -- --gpu-memory-utilization SHARE, or lower --max-model-len N",
    ),
    (
        "Free memory on device .* less than desired",
        "another process uses the GPU; end that process, or lower -- --gpu-memory-utilization SHARE",
    ),
    (
        "Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver",
        "vLLM finds no GPU; install its build for CPUs, or use a server with a GPU with --base-url",
    ),
    (
        "not a valid model identifier|RepositoryNotFoundError|Repository Not Found",
        "the hub has no such model, or you have no access; check the model's name, and HF_TOKEN",
    ),
    (
        "GatedRepoError|gated repo",
        "access to the model is restricted; accept its conditions on the hub, and set HF_TOKEN",
    ),
    (
        "outgoing traffic has been disabled|LocalEntryNotFoundError|couldn't connect to .https://huggingface",
        "the hub cannot be reached, and the model is not on this machine; download the model, or name its folder",
    ),
    ("trust[-_]remote[-_]code=True", "the model includes code; to run it, add -- --trust-remote-code"),
    ("unrecognized arguments", "vLLM does not know an option after --; run vllm serve --help=all for its options"),
)
"""Patterns in vLLM's output, and advice for each."""

PORT_TAKEN_PATTERN = re.compile("address already in use", re.IGNORECASE)


class LogTail(io.StringIO):
    """Writes to *out* and keeps the last lines."""

    def __init__(self, out: TextIO | None) -> None:
        super().__init__()
        self._out = out or sys.stderr
        self._last: deque[str] = deque(maxlen=MAX_KEPT_LINES)

    def write(self, text: str) -> int:
        """Write one line; of a progress bar, its last state."""
        name, separator, message = text.partition(" | ")
        line = name + separator + message.rpartition("\r")[2]
        self._last.append(line.rstrip())
        self._out.write(line)
        return len(text)

    def flush(self) -> None:
        """Flush *out*."""
        self._out.flush()

    @property
    def says_port_taken(self) -> bool:
        """Whether vLLM failed because another process uses its port."""
        return any(PORT_TAKEN_PATTERN.search(line) for line in self._last)

    @property
    def last_lines(self) -> str:
        """The last lines, preceded by the line that names the cause."""
        lines = [line for line in self._last if line.partition("|")[2].strip()]
        cause = [line for line in lines[:-MAX_SHOWN_LINES] if _find_advice(line)][-1:]
        return "\n".join([*cause, *lines[-MAX_SHOWN_LINES:]])

    @property
    def advice(self) -> str:
        """The advice for the first line that matches a known pattern, or an empty string."""
        return next(filter(None, map(_find_advice, self._last)), "")


def _find_advice(line: str) -> str:
    return next((advice for pattern, advice in ADVICE_BY_PATTERN if re.search(pattern, line)), "")


NAME = "vllm"
"""The name of the process in front of its output."""

POLL_SECONDS, REQUEST_SECONDS = 0.25, 3.0
"""Seconds between two checks whether vLLM is ready, and for one request, which is not retried."""


UNAUTHORIZED = 401


class PortTaken(GymsdkError):
    """Another process took the port between the search for a free one and its use."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running vLLM.

    Attributes:
        name: The name of the model in requests.
        url: The base URL, which ends in /v1.
        key: The key that requests need, if any.
        running: The task of the supervisor.
        supervisor: Restarts vLLM when it exits.
    """

    name: str
    url: str
    key: SecretStr | None
    running: asyncio.Task[None] = field(repr=False)
    supervisor: Supervisor = field(repr=False)

    @property
    def last_exit(self) -> Exit | None:
        """The last exit of vLLM, or `None`."""
        return self.supervisor.exits.get(NAME)

    async def wait_for_end(self) -> None:
        """Wait while vLLM runs or is restarted; raises `GymsdkError` if it cannot be restarted."""
        # Shielded: cancelling the caller ends its wait, not vLLM.
        await asyncio.shield(self.running)


@asynccontextmanager
async def launch_vllm(launch: Launch, *, out: TextIO | None = None) -> AsyncIterator[Engine]:
    """Run vLLM while the context is open; on entry, vLLM is ready. It is restarted when it exits.

    Args:
        launch: What to launch.
        out: Where its output goes, by default standard error.

    Raises:
        UsageError: The arguments are invalid.
        GymsdkError: vLLM does not become ready. No process is left running.
    """
    vllm_command.check_launch(launch)
    path = vllm_command.find_program()
    (out or sys.stderr).write(vllm_command.log_command(launch) + "\n")
    try:
        engine = await _start(launch, path, LogTail(out))
    except PortTaken:
        # Another process took the free port before vLLM bound it; the second attempt searches again.
        engine = await _start(launch, path, LogTail(out))
    try:
        yield engine
    finally:
        await _stop(engine.running)
    if not engine.running.cancelled():
        engine.running.result()


async def _start(launch: Launch, path: str, log_tail: LogTail) -> Engine:
    """Start vLLM and wait until it is ready."""
    flags = launch.parsed_flags
    host = get_reachable_host(vllm_command.get_host(flags))
    port = await _choose_port(launch, host)
    ready = asyncio.Event()
    # The processes that vLLM starts would import from the working folder.
    command = vllm_command.build_command(launch, path, port)
    # Restarted only after a first success: vLLM would fail again with the same arguments, memory or model.
    spec = ProcessSpec(NAME, command, is_restarted=ready.is_set, variables=SAFE_PATH)
    supervisor = Supervisor([spec], seconds=launch.ending, out=log_tail)
    engine = Engine(
        launch.name, _build_url(host, port), _get_api_key(), asyncio.ensure_future(supervisor.run()), supervisor
    )
    try:
        await _wait_until_ready(engine, launch, log_tail)
    except BaseException:
        await _stop(engine.running)
        raise
    ready.set()
    supervisor.mark_ready(NAME)
    return engine


async def _choose_port(launch: Launch, host: str) -> int:
    """Return the port that the user chose, or a free one; raises `UsageError` if the chosen one is in use."""
    chosen = vllm_command.get_port(launch.parsed_flags)
    if chosen and launch.name in _parse_model_names(await _get(f"{_build_url(host, chosen)}/models", _get_api_key())):
        raise UsageError(
            f"{launch.name} is already served at {_build_url(host, chosen)}; replace --launch-vllm with --base-url"
            f" {_build_url(host, chosen)}, or choose another port with -- --port N"
        )
    # Closed again at once, because vLLM binds the port itself; see `PortTaken`.
    with bind_socket(vllm_command.get_host(launch.parsed_flags), chosen or 0, what="vLLM") as sock:
        port: int = sock.getsockname()[1]
        return port


def _build_url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _get_api_key() -> SecretStr | None:
    return SecretStr(os.environ[vllm_command.KEY]) if os.environ.get(vllm_command.KEY) else None


async def _wait_until_ready(engine: Engine, launch: Launch, log_tail: LogTail) -> None:
    """Wait until vLLM serves the model; raises `GymsdkError` if vLLM exits before, or takes too long."""
    waiting = asyncio.ensure_future(_wait_for_model(engine))
    try:
        await asyncio.wait({waiting, engine.running}, timeout=launch.starting, return_when="FIRST_COMPLETED")
        if engine.running.done():
            raise _build_start_error(engine, launch, log_tail)
        if not waiting.done():
            raise GymsdkError(
                f"vLLM with {launch.name} was not ready within {launch.starting:g} s; if it is only slow, allow"
                f" more time (model_endpoint_readiness_timeout_seconds). Its last lines:\n{log_tail.last_lines}"
            )
        waiting.result()
    finally:
        waiting.cancel()


def _build_start_error(engine: Engine, launch: Launch, log_tail: LogTail) -> GymsdkError:
    """Return the error for an exit before vLLM was ready, with its last lines."""
    if log_tail.says_port_taken and vllm_command.get_port(launch.parsed_flags) is None:
        return PortTaken("vLLM found its port taken, twice; choose one with -- --port N")
    code = engine.last_exit.code if engine.last_exit else 0
    advice = log_tail.advice or "its output says why"
    kind = UsageError if code == USAGE_EXIT_CODE else GymsdkError
    return kind(
        f"vLLM with {launch.name} did not start ({describe_exit(code)}): {advice}. Its last lines:\n"
        f"{log_tail.last_lines}"
    )


async def _wait_for_model(engine: Engine) -> None:
    """Wait until vLLM is healthy and lists its models; raises `GymsdkError` if the model is missing."""
    while (answer := await _list_models(engine)) is None:  # noqa: ASYNC110  # another process sets no event
        await asyncio.sleep(POLL_SECONDS)
    if answer.status == UNAUTHORIZED:
        raise UsageError(f"vLLM at {engine.url} requires a key; set {vllm_command.KEY}")
    if engine.name not in (served := _parse_model_names(answer)):
        raise GymsdkError(
            f"vLLM at {engine.url} serves {', '.join(served) or 'nothing'}, and not {engine.name!r}; add it after"
            f" -- {vllm_command.NAMES}"
        )


async def _list_models(engine: Engine) -> client.HttpResponse | None:
    """Return the response with the list of models, or `None` while vLLM is not healthy."""
    health = await _get(engine.url.removesuffix("v1") + "health")
    return await _get(f"{engine.url}/models", engine.key) if health and health.ok else None


async def _get(url: str, key: SecretStr | None = None) -> client.HttpResponse | None:
    """Return the response at *url*, or `None` if the server cannot be reached."""
    try:
        return await client.get(url, key=key, timeout=REQUEST_SECONDS, retry=client.NO_RETRY)
    except Failed:
        return None


def _parse_model_names(answer: client.HttpResponse | None) -> list[str]:
    """Return the names of the models in *answer*; empty if it is not a list of models."""
    try:
        listed = answer.json() if answer else None
    except Failed:
        return []
    models = listed.get("data") if isinstance(listed, dict) else None
    return [str(model.get("id")) for model in models or [] if isinstance(model, dict)]


async def _stop(running: asyncio.Task[None]) -> None:
    """Stop the supervisor, and ignore the error with which it may have ended."""
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.exception()


__all__ = ["Engine", "Launch", "launch_vllm"]
