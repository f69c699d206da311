"""An engine: a vLLM of our own, which serves a model for as long as it is needed, and ends with us."""

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
from pathlib import Path
from typing import TextIO

from pydantic import SecretStr

from gymsdk.deploy import parent, vllm_command
from gymsdk.deploy.supervisor import USAGE, Charge, Supervisor, told
from gymsdk.deploy.vllm_command import Launch
from gymsdk.errors import Failed, GymsdkError, UsageError
from gymsdk.http import client
from gymsdk.http.tls import get_reachable_host
from gymsdk.servers.listener import bind_socket
from gymsdk.servers.reports import Exit

KEPT = 2000
"""Lines that are kept: the cause of an end stands well before its last line."""

SHOWN = 6
"""Lines that an error repeats."""

MENDS = (
    (
        "invalid tool call parser",
        "this vLLM has no such parser of calls; it lists those it has: name one with -- --tool-call-parser NAME",
    ),
    (
        "CUDA out of memory|HIP out of memory|torch.OutOfMemoryError",
        "the GPU has too little memory for it; use less with -- --max-model-len N or --gpu-memory-utilization SHARE",
    ),
    (
        "No available memory for the cache blocks|larger than the available KV cache",
        "what its weights leave is too little; raise -- --gpu-memory-utilization SHARE, or lower --max-model-len N",
    ),
    (
        "Free memory on device .* less than desired",
        "something else uses the GPU; end that, or lower -- --gpu-memory-utilization SHARE",
    ),
    (
        "Failed to infer device type|No CUDA GPUs are available|Found no NVIDIA driver",
        "it finds no GPU; install vLLM's build for CPUs, or name a server that has one with --base-url",
    ),
    (
        "not a valid model identifier|RepositoryNotFoundError|Repository Not Found",
        "the hub knows no such model, or not for you; check its name, and HF_TOKEN in the environment",
    ),
    ("GatedRepoError|gated repo", "the model is given out on conditions; accept them on the hub, and set HF_TOKEN"),
    (
        "outgoing traffic has been disabled|LocalEntryNotFoundError|couldn't connect to .https://huggingface",
        "the hub is not reached, and the model is not here; download it, or name the folder it is in",
    ),
    ("trust[-_]remote[-_]code=True", "the model brings code of its own; to run that, add -- --trust-remote-code"),
    ("unrecognized arguments", "what stands behind -- is vLLM's to know; vllm serve --help=all lists it"),
)
"""What vLLM writes, and what mends it."""

TAKEN = re.compile("address already in use", re.IGNORECASE)


class Journal(io.StringIO):
    """Passes on to *out* what is written to it, and keeps the last lines."""

    def __init__(self, out: TextIO | None) -> None:
        super().__init__()
        self._out = out or sys.stderr
        self._last: deque[str] = deque(maxlen=KEPT)

    def write(self, text: str) -> int:
        """Pass on one line, in its last state where it was written over."""
        name, bar, said = text.partition(" | ")
        line = name + bar + said.rpartition("\r")[2]
        self._last.append(line.rstrip())
        self._out.write(line)
        return len(text)

    def flush(self) -> None:
        """Have what was passed on be seen."""
        self._out.flush()

    @property
    def taken(self) -> bool:
        """Whether it could not listen, somebody else being there."""
        return any(TAKEN.search(line) for line in self._last)

    @property
    def last(self) -> str:
        """The last lines, behind the one that says what is wrong, each on a line of its own."""
        lines = [line for line in self._last if line.partition("|")[2].strip()]
        telling = [line for line in lines[:-SHOWN] if _mend(line)][-1:]
        return "\n".join([*telling, *lines[-SHOWN:]])

    @property
    def mend(self) -> str:
        """What usually mends it, nothing where nobody knows."""
        return next(filter(None, map(_mend, self._last)), "")


def _mend(line: str) -> str:
    return next((mend for pattern, mend in MENDS if re.search(pattern, line)), "")


NAME = "vllm"
"""What its lines begin with."""

TICK, ASKING = 0.25, 3.0
"""Seconds between two looks whether it is ready, and for an answer to one, which is not asked for again."""


UNAUTHORIZED = 401


class PortLost(GymsdkError):
    """Somebody else took the port between the look for a free one and its use."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM that answers at *url*, which ends in /v1, to the model's *name*; *key* is what it asks for, if any."""

    name: str
    url: str
    key: SecretStr | None
    running: asyncio.Task[None] = field(repr=False)
    supervisor: Supervisor = field(repr=False)

    @property
    def exit(self) -> Exit | None:
        """How it ended last, `None` where it never did."""
        return self.supervisor.exits.get(NAME)

    async def ended(self) -> None:
        """Wait for as long as it runs, or is started again; raises `GymsdkError` where it cannot be."""
        await asyncio.shield(self.running)


@asynccontextmanager
async def launched(launch: Launch, *, out: TextIO | None = None) -> AsyncIterator[Engine]:
    """Serve *launch* for as long as the context is open; it is ready when that opens.

    What it writes goes to *out*, by default standard error. One that ends is started again. Raises `UsageError` where
    it cannot be launched as asked, `GymsdkError` where it does not get ready; whatever is wrong, nothing is left.
    """
    vllm_command.checked(launch)
    path = vllm_command.program()
    (out or sys.stderr).write(vllm_command.told(launch) + "\n")
    try:
        engine = await _begun(launch, path, Journal(out))
    except PortLost:
        engine = await _begun(launch, path, Journal(out))
    try:
        yield engine
    finally:
        await _over(engine.running)
    if not engine.running.cancelled():
        engine.running.result()


async def _begun(launch: Launch, path: str, journal: Journal) -> Engine:
    """Give it once it is ready."""
    flags = launch.given
    host = get_reachable_host(vllm_command.host(flags))
    at = await _port(launch, host)
    ready = asyncio.Event()
    charge = Charge(NAME, [*_warden(launch.ending), *vllm_command.words(launch, path, at)], again=ready.is_set)
    # Longer than the warden's, which would otherwise be killed while it ends what it guards.
    supervisor = Supervisor([charge], seconds=launch.ending + 2, out=journal)
    engine = Engine(launch.name, _url(host, at), _key(), asyncio.ensure_future(supervisor.run()), supervisor)
    try:
        await _ready(engine, launch, journal)
    except BaseException:
        await _over(engine.running)
        raise
    ready.set()
    supervisor.ready(NAME)
    return engine


async def _port(launch: Launch, host: str) -> int:
    """Give the port its user chose, or one that is free; raises `UsageError` where that is taken."""
    chosen = vllm_command.port(launch.given)
    if chosen and launch.name in _names(await _got(f"{_url(host, chosen)}/models", _key())):
        raise UsageError(
            f"{launch.name} is served at {_url(host, chosen)} already; leave --launch-vllm out and add --base-url"
            f" {_url(host, chosen)}, or choose another port with -- --port N"
        )
    with bind_socket(vllm_command.host(launch.given), chosen or 0, what="vLLM") as there:
        port: int = there.getsockname()[1]
        return port


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"


def _warden(seconds: float) -> list[str]:
    """Give the words that start a warden: a Python as it comes, whatever is installed or set."""
    return [sys.executable, "-I", "-S", str(Path(parent.__file__)), str(seconds)]


def _key() -> SecretStr | None:
    return SecretStr(os.environ[vllm_command.KEY]) if os.environ.get(vllm_command.KEY) else None


async def _ready(engine: Engine, launch: Launch, journal: Journal) -> None:
    """Wait until it answers to its name; raises `GymsdkError` where it ends before, or where that takes too long."""
    waiting = asyncio.ensure_future(_answers(engine))
    try:
        await asyncio.wait({waiting, engine.running}, timeout=launch.starting, return_when="FIRST_COMPLETED")
        if engine.running.done():
            raise _ended(engine, launch, journal)
        if not waiting.done():
            raise GymsdkError(
                f"vLLM with {launch.name} was not ready within {launch.starting:g} s; where it only takes long, give it"
                f" more (model_endpoint_readiness_timeout_seconds). Its last lines:\n{journal.last}"
            )
        waiting.result()
    finally:
        waiting.cancel()


def _ended(engine: Engine, launch: Launch, journal: Journal) -> GymsdkError:
    """Give why it ended before it was ready, in its own words."""
    if journal.taken and vllm_command.port(launch.given) is None:
        return PortLost("vLLM found its port taken, twice; choose one with -- --port N")
    code = engine.exit.code if engine.exit else 0
    mend = journal.mend or "what it wrote says why"
    kind = UsageError if code == USAGE else GymsdkError
    return kind(f"vLLM with {launch.name} did not start ({told(code)}): {mend}. Its last lines:\n{journal.last}")


async def _answers(engine: Engine) -> None:
    """Wait until it is healthy and lists its models; raises `GymsdkError` where the name is not among them."""
    while (answer := await _listed(engine)) is None:  # noqa: ASYNC110  # another process tells of nothing
        await asyncio.sleep(TICK)
    if answer.status == UNAUTHORIZED:
        raise UsageError(f"vLLM at {engine.url} asks for a key that nobody here knows; put it into {vllm_command.KEY}")
    if engine.name not in (served := _names(answer)):
        raise GymsdkError(
            f"vLLM at {engine.url} serves {', '.join(served) or 'nothing'}, and not {engine.name!r}; name that behind"
            f" -- {vllm_command.NAMES}"
        )


async def _listed(engine: Engine) -> client.HttpResponse | None:
    """Give how it lists its models, `None` while it is not healthy."""
    health = await _got(engine.url.removesuffix("v1") + "health")
    return await _got(f"{engine.url}/models", engine.key) if health and health.ok else None


async def _got(url: str, key: SecretStr | None = None) -> client.HttpResponse | None:
    """Give what is answered at *url*, `None` where nobody is there."""
    headers = {"Authorization": SecretStr(f"Bearer {key.get_secret_value()}")} if key else None
    try:
        return await client.get(url, headers=headers, timeout=ASKING, retry=client.NO_RETRY)
    except Failed:
        return None


def _names(answer: client.HttpResponse | None) -> list[str]:
    """Give the names of the models that *answer* lists, none where it is no list of models."""
    try:
        listed = answer.json() if answer else None
    except Failed:
        return []
    models = listed.get("data") if isinstance(listed, dict) else None
    return [str(each.get("id")) for each in models or [] if isinstance(each, dict)]


async def _over(running: asyncio.Task[None]) -> None:
    """End it; what it ended of by itself is no news where this is called."""
    running.cancel()
    await asyncio.wait({running})
    if not running.cancelled():
        running.exception()


__all__ = ["Engine", "Launch", "launched"]
