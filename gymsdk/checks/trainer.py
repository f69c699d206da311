"""Check the five components of a trainer's integration against the trainer's own generation server.

The components are those of NeMo Gym's integration guide: an OpenAI-compatible generation server, on-policy token ids,
starting the servers of the environments, playing rollouts, and the training loop with its weight updates. Each check
uses the code that plays rollouts in training: gymsdk's model client, its servers, and their HTTP API.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from gymsdk.checks import probe
from gymsdk.checks.engine import EngineChecker, list_checks
from gymsdk.checks.results import CheckFailed, CheckResult, CheckSkipped, run_check
from gymsdk.client import ServerClient
from gymsdk.config.model import Deployment, ModelServerConfig
from gymsdk.convert.token_limits import is_context_overflow
from gymsdk.deploy.process import RunningServers, serve
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.http import client as http
from gymsdk.models import registry as models
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS, WEIGHT_VERSION_FIELD
from gymsdk.tokens.tokenizer import load_tokenizer
from gymsdk.types import Item, Row

COMPONENTS = (
    "OpenAI-compatible generation server",
    "On-policy token ids",
    "Starting the environments",
    "Playing rollouts",
    "Training loop",
)
"""The components, in the order of the guide."""

NAME = "trainer_probe"
CONVERSATIONS = 8
CONCURRENT_CALLS = 32
UPDATE_SECONDS = 600.0
MAX_LOGPROB = 1e-3
"""The largest log-probability of reduced precision; it may exceed 0 by rounding."""

PROMPT: Item = {"input": "Write one word.", "max_output_tokens": 1, "temperature": 1.0, "top_p": 1.0}


@dataclass(frozen=True)
class TrainerStack:
    """The subject of a check.

    Attributes:
        base_url: The URL of the generation server, with `/v1`.
        model: The name under which it serves the policy.
        update_weights: A shell command that updates the weights of the generation server once; empty without one.
        model_options: Further options of gymsdk's model client. The engine's ids and texts are compared with those of
            the `tokenizer` in it.
    """

    base_url: str
    model: str = "policy"
    update_weights: str = ""
    model_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """The options of gymsdk's model client."""
        return {
            "base_url": self.base_url,
            "tokens": True,
            "timeout": 60.0,
            **self.model_options,
        }


async def check_trainer(stack: TrainerStack) -> AsyncIterator[CheckResult]:
    """Yield the result of each check as soon as it is known.

    If the generation server does not answer at all, the other checks are skipped.
    """
    checker = _TrainerChecker(stack)
    steps: Sequence[tuple[int, str, Callable[[], Awaitable[str]]]] = (
        (1, "lists its models", checker.list_models),
        (1, "answers a call", checker.call),
        (1, "returns token ids and log-probabilities", checker.return_tokens),
        (1, f"answers {CONCURRENT_CALLS} calls at the same time", checker.call_concurrently),
        (1, "refuses a prompt that exceeds the context with 400", checker.exceed_context),
        (2, "keeps the sampled ids over several turns", checker.continue_ids),
        *((2, name, checker.with_tokens(check)) for name, check in list_checks(checker.engine)),
        (3, "starts agent, model server and environment", checker.start),
        (4, "plays rollouts as single sequences of tokens", checker.play_rollouts),
        (4, "refuses a wrong row with 4xx", checker.send_wrong_row),
        (5, "holds calls while weights are updated", checker.hold_calls),
        (5, "uses new weights after an update", checker.update_weights),
    )
    unreachable = ""
    async with checker.servers:
        for component, name, check in steps:
            if unreachable:
                yield CheckResult(component=component, name=name, outcome="skipped", detail=unreachable)
                continue
            result = await run_check(component, name, check)
            yield result
            if check == checker.call and result.outcome == "failed":
                unreachable = "the generation server answers no call"
    await http.aclose()


class _TrainerChecker:
    """Runs the checks, which build upon each other."""

    def __init__(self, stack: TrainerStack) -> None:
        self.servers = AsyncExitStack()
        self._stack = stack
        self._model = models.model(f"vllm/{stack.model}", **stack.options)
        # Without token ids, so that the first checks also pass on a server that returns none.
        self._plain_model = models.model(f"vllm/{stack.model}", base_url=stack.base_url, timeout=60.0, retries=1)
        name = stack.model_options.get("tokenizer")
        tokenizer = None if name is None else load_tokenizer(name)
        self.engine = EngineChecker(self._model, tokenizer)  # type: ignore[arg-type]  # a model on a server
        self._max_model_len: int | None = None
        self._has_tokens = False
        self._running: RunningServers | None = None

    async def list_models(self) -> str:
        answer = await http.get(f"{self._stack.base_url}/models", timeout=30.0, retry=http.NO_RETRY)
        listed = answer.json()
        entries = listed.get("data") if isinstance(listed, dict) else None
        if not entries or not isinstance(entries, list):
            raise CheckFailed("GET /models has no list of models in `data`")
        for entry in entries:
            if entry.get("id") == self._stack.model:
                self._max_model_len = self.engine.context = entry.get("max_model_len")
        names = [str(entry.get("id")) for entry in entries]
        if self._stack.model not in names:
            raise CheckFailed(f"the model {self._stack.model!r} is not listed ({', '.join(names)}); pass --model NAME")
        context = f", a context of {self._max_model_len} tokens" if self._max_model_len else ""
        return f"{self._stack.model}{context}"

    async def call(self) -> str:
        response = await self._plain_model.respond(PROMPT)
        if not response["output"]:
            raise CheckFailed("the answer has no output")
        return "with temperature and top_p"

    async def return_tokens(self) -> str:
        response = await self._model.respond(PROMPT)
        carrier = response["output"][-1]
        logprobs = carrier[TOKEN_FIELDS[2]]
        wrong = [value for value in logprobs if not math.isfinite(value) or value > MAX_LOGPROB]
        if wrong:
            raise CheckFailed(f"the log-probability {wrong[0]} is no logarithm of a probability")
        self._has_tokens = True
        interface = await self._model.check_tokens()  # type: ignore[attr-defined]  # a model on a server
        return f"interface {interface}"

    async def call_concurrently(self) -> str:
        calls = [self._plain_model.respond(PROMPT) for _ in range(CONCURRENT_CALLS)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failures = [answer for answer in answers if isinstance(answer, BaseException)]
        if failures:
            raise CheckFailed(f"{len(failures)} of {CONCURRENT_CALLS} calls failed: {failures[0]}")
        return ""

    async def exceed_context(self) -> str:
        if not self._max_model_len:
            raise CheckSkipped("GET /models gives no max_model_len")
        words = "1 2 3 " * self._max_model_len
        body = {"model": self._stack.model, "messages": [{"role": "user", "content": words}], "max_tokens": 1}
        body |= {"temperature": 1.0, "top_p": 1.0}
        answer = await http.post(
            f"{self._stack.base_url}/chat/completions", body, timeout=60.0, retry=http.NO_RETRY, once=True
        )
        if not is_context_overflow(answer.status, answer.body):
            raise CheckFailed(
                f"the answer to a prompt of twice the context has status {answer.status}; answer with status 400 and a"
                " message that names the maximum context length, so that the turn ends as truncated instead of failing"
            )
        return "the turn ends as truncated"

    async def continue_ids(self) -> str:
        self._require_tokens()
        environment = Environment(NAME, probe)
        turns = 0
        for number, row in enumerate(self._build_rows()):
            rollout = await play(environment, self._model, row, seed=number, id=f"{NAME}-{number}")
            if rollout.failure is not None:
                raise CheckFailed(f"conversation {number}: {rollout.failure.message}")
            turns += _check_sequence(number, (rollout.response or {}).get("output") or [])
        if turns == CONVERSATIONS:
            raise CheckSkipped("no reply was complete, so no conversation had a second turn")
        return f"{turns} turns of {CONVERSATIONS} conversations"

    async def start(self) -> str:
        options = self._stack.options
        deployment = Deployment(
            model=ModelServerConfig(name=f"vllm/{self._stack.model}", options=options), port=0, server_ports={}
        )
        self._running = await self.servers.enter_async_context(serve([Environment(NAME, probe)], deployment=deployment))
        return f"{len(self._running.urls)} servers and a head"

    async def play_rollouts(self) -> str:
        self._require_tokens()
        results = await asyncio.gather(*(self._play(row) for row in self._build_rows()))
        turns = 0
        for number, result in enumerate(results):
            if not isinstance(result.get("reward"), (int, float)):
                raise CheckFailed(f"rollout {number} has no reward")
            turns += _check_sequence(number, result["response"]["output"])
        return f"{len(results)} rollouts, {turns} turns"

    async def send_wrong_row(self) -> str:
        answer = await self._get_client().post(f"{NAME}_simple_agent", "/run", json={"responses_create_params": 7})
        if not 400 <= answer.status < 500:  # noqa: PLR2004 - HTTP's range of errors of the client
            raise CheckFailed(f"a wrong row is answered with status {answer.status}")
        return f"status {answer.status}, so a trainer does not play it again"

    async def hold_calls(self) -> str:
        self._require_tokens()
        client = self._get_client()
        url = self._get_running().urls["policy_model"]
        retry = http.DEFAULT_RETRY
        paused = (await http.post(f"{url}/pause?wait=60", {"max_seconds": 60.0}, timeout=90.0, retry=retry)).json()
        playing = asyncio.ensure_future(client.post(f"{NAME}_simple_agent", "/run", json=self._build_rows()[0]))
        # Time for the rollout to reach its first model call.
        await asyncio.sleep(0.5)
        state = (await http.get(f"{url}/pause", timeout=30.0, retry=retry)).json()
        await http.post(f"{url}/resume", {}, timeout=30.0, retry=retry)
        answer = await playing
        if paused["in_flight"] or not state["waiting"] or not answer.ok:
            raise CheckFailed(f"calls are not held: {state}, and the rollout ends with status {answer.status}")
        return "POST /pause and /resume of the model server"

    async def update_weights(self) -> str:
        if not self._stack.update_weights:
            raise CheckSkipped("pass --update-weights COMMAND, which sends weights to the generation server once")
        self._require_tokens()
        before, version = await self.engine.measure_reference(), await self._get_version()
        await self._run_update()
        after, new_version = await self.engine.measure_reference(), await self._get_version()
        change = self.engine.describe_change(before, after)
        if version is not None and version == new_version:
            raise CheckFailed(f"the server still names the weight version {version}")
        # A prefix cache that outlives the update mixes values of old and new weights.
        for check in (self.engine.check_scores, self.engine.check_sampling):
            try:
                await check()
            except CheckFailed as failed:
                raise CheckFailed(f"after the update: {failed}; clear the prefix cache with the update") from None
            except CheckSkipped:
                continue
        versions = "" if version is None else f", weight version {version} to {new_version}"
        return f"{change}{versions}"

    async def _run_update(self) -> None:
        process = await asyncio.create_subprocess_shell(
            self._stack.update_weights, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(UPDATE_SECONDS):
                _, errors = await process.communicate()
        except TimeoutError:
            process.kill()
            raise CheckFailed(f"the command of --update-weights did not end within {UPDATE_SECONDS:g} s") from None
        if process.returncode:
            last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise CheckFailed(f"the command of --update-weights ended with {process.returncode}: {last[0]}")

    def _build_rows(self) -> list[Row]:
        return [task.row() for task in islice(probe.tasks("probe"), CONVERSATIONS)]

    def with_tokens(self, check: Callable[[], Awaitable[str]]) -> Callable[[], Awaitable[str]]:
        """Return *check* for servers with token ids; with others it is skipped."""

        async def run() -> str:
            self._require_tokens()
            return await check()

        return run

    def _require_tokens(self) -> None:
        if not self._has_tokens:
            raise CheckSkipped("the generation server returns no token ids")

    def _get_running(self) -> RunningServers:
        if self._running is None:
            raise CheckSkipped("the servers have not started")
        return self._running

    def _get_client(self) -> ServerClient:
        return ServerClient(self._get_running().head_url, seconds=300.0)

    async def _play(self, row: Row) -> Row:
        answer = await self._get_client().post(f"{NAME}_simple_agent", "/run", json=row)
        if not answer.ok:
            raise CheckFailed(f"a rollout ends with status {answer.status}: {answer.text[:300]}")
        result: Row = answer.json()
        return result

    async def _get_version(self) -> int | str | None:
        response = await self._model.respond(PROMPT)
        version: int | str | None = response["output"][-1].get(WEIGHT_VERSION_FIELD)
        return version


def _check_sequence(number: int, output: Sequence[Item]) -> int:
    """Return the number of turns of a rollout; raise `CheckFailed` if a prompt does not continue the turn before."""
    ids: list[int] = []
    turns = 0
    for item in output:
        if not item.get(TOKEN_FIELDS[1]):
            continue
        prompt, generated, logprobs = (item[key] for key in TOKEN_FIELDS)
        if prompt[: len(ids)] != ids or item.get(BROKEN_FIELD):
            raise CheckFailed(f"turn {turns + 1} of rollout {number} does not continue the tokens of the turn before")
        if len(generated) != len(logprobs):
            raise CheckFailed(f"turn {turns + 1} of rollout {number} has {len(logprobs)} log-probabilities")
        ids = [*prompt, *generated]
        turns += 1
    if not turns:
        raise CheckFailed(f"rollout {number} has no token ids")
    return turns
