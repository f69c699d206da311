"""Check the five components of a trainer's integration against the trainer's own generation server.

The components are those of NeMo Gym's integration guide: an OpenAI-compatible generation server, on-policy token ids,
starting the servers of the environments, playing rollouts, and the training loop with its weight updates. Each check
uses the code that plays rollouts in training: gymsdk's model client, its servers, and their HTTP API.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict

from gymsdk import responses
from gymsdk.checks import probe
from gymsdk.client import ServerClient
from gymsdk.config.model import Deployment, ModelServerConfig
from gymsdk.deploy.process import RunningServers, serve
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.errors import GymsdkError
from gymsdk.http import client as http
from gymsdk.models import registry as models
from gymsdk.responses import BROKEN_FIELD, TOKEN_FIELDS, WEIGHT_VERSION_FIELD
from gymsdk.types import Item, Row

Outcome: TypeAlias = Literal["passed", "failed", "skipped"]

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
SAMPLES = 32
"""The number of samples of one prompt whose log-probabilities are compared."""

STABLE_GAP = 1e-3
"""The largest difference between two log-probabilities of one token after one prompt, with the same weights.

Engines compute in reduced precision, and batches change the order of sums.
"""

PROMPT: Item = {"input": "Write one word.", "max_output_tokens": 1, "temperature": 1.0, "top_p": 1.0}


class CheckResult(BaseModel):
    """The result of one check.

    Attributes:
        component: The number of the component, from 1.
        name: What is checked.
        outcome: Whether it passed.
        detail: What was measured, or why the check failed or was skipped.
    """

    model_config = ConfigDict(frozen=True)

    component: int
    name: str
    outcome: Outcome
    detail: str


class CheckFailed(Exception):
    """A check found a defect; its message says which, and what to change."""


class CheckSkipped(Exception):
    """A check does not apply; its message says why."""


@dataclass(frozen=True)
class TrainerStack:
    """What is checked.

    Attributes:
        base_url: The URL of the generation server, with `/v1`.
        model: The name under which it serves the policy.
        update_weights: A shell command that updates the weights of the generation server once; empty without one.
        token_interface: The token interface, `None` to find it out.
    """

    base_url: str
    model: str = "policy"
    update_weights: str = ""
    token_interface: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of gymsdk's model client."""
        return {"base_url": self.base_url, "tokens": True, "token_interface": self.token_interface, "timeout": 60.0}


async def check_trainer(stack: TrainerStack) -> AsyncIterator[CheckResult]:
    """Yield the result of each check as soon as it is known.

    If the generation server does not answer at all, the other checks are skipped.

    Args:
        stack: The trainer's servers.
    """
    checker = _TrainerChecker(stack)
    steps: Sequence[tuple[int, str, Callable[[], Awaitable[str]]]] = (
        (1, "lists its models", checker.list_models),
        (1, "answers a call", checker.call),
        (1, "returns token ids and log-probabilities", checker.return_tokens),
        (1, f"answers {CONCURRENT_CALLS} calls at the same time", checker.call_concurrently),
        (1, "refuses a prompt that exceeds the context with 400", checker.exceed_context),
        (2, "keeps the sampled ids over several turns", checker.continue_ids),
        (2, "gives one token of one prompt one log-probability", checker.repeat_logprobs),
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
            result = await _run_check(component, name, check)
            yield result
            if check == checker.call and result.outcome == "failed":
                unreachable = "the generation server answers no call"
    await http.aclose()


async def _run_check(component: int, name: str, check: Callable[[], Awaitable[str]]) -> CheckResult:
    try:
        outcome, detail = "passed", await check()
    except CheckSkipped as skipped:
        outcome, detail = "skipped", str(skipped)
    except (CheckFailed, GymsdkError) as error:
        outcome, detail = "failed", str(error)
    return CheckResult.model_validate({"component": component, "name": name, "outcome": outcome, "detail": detail})


class _TrainerChecker:
    """Runs the checks, which build upon each other."""

    def __init__(self, stack: TrainerStack) -> None:
        self.servers = AsyncExitStack()
        self._stack = stack
        self._model = models.model(f"vllm/{stack.model}", **stack.options)
        self._plain_model = models.model(f"vllm/{stack.model}", base_url=stack.base_url, timeout=60.0, retries=1)
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
                self._max_model_len = entry.get("max_model_len")
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
        wrong = [each for each in logprobs if not math.isfinite(each) or each > STABLE_GAP]
        if wrong:
            raise CheckFailed(f"the log-probability {wrong[0]} is no logarithm of a probability")
        self._has_tokens = True
        interface = await self._model.check_tokens()  # type: ignore[attr-defined]  # a model on a server
        return f"interface {interface}"

    async def call_concurrently(self) -> str:
        calls = [self._plain_model.respond(PROMPT) for _ in range(CONCURRENT_CALLS)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        failures = [each for each in answers if isinstance(each, BaseException)]
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
        if not responses.is_context_overflow(answer.status, answer.body):
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

    async def repeat_logprobs(self) -> str:
        self._require_tokens()
        first, second = await self._sample_logprobs(), await self._sample_logprobs()
        common = first.keys() & second.keys()
        if not common:
            raise CheckSkipped(f"no token was sampled twice in {2 * SAMPLES} samples")
        gap = max(abs(first[token] - second[token]) for token in common)
        if gap > STABLE_GAP:
            raise CheckFailed(
                f"the same token after the same prompt has log-probabilities that differ by {gap:.3g}; return the"
                " log-probabilities of the policy, without penalties, masks or another temperature"
            )
        return f"largest difference {gap:.1e} over {len(common)} tokens"

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
        paused = (await http.post(f"{url}/pause?wait=60", {"max_seconds": 60.0}, timeout=90.0)).json()
        playing = asyncio.ensure_future(client.post(f"{NAME}_simple_agent", "/run", json=self._build_rows()[0]))
        await asyncio.sleep(0.5)
        state = (await http.get(f"{url}/pause", timeout=30.0)).json()
        await http.post(f"{url}/resume", {}, timeout=30.0)
        answer = await playing
        if paused["in_flight"] or not state["waiting"] or not answer.ok:
            raise CheckFailed(f"calls are not held: {state}, and the rollout ends with status {answer.status}")
        return "POST /pause and /resume of the model server"

    async def update_weights(self) -> str:
        if not self._stack.update_weights:
            raise CheckSkipped("pass --update-weights COMMAND, which sends weights to the generation server once")
        self._require_tokens()
        before, version = await self._sample_logprobs(), await self._get_version()
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
        after, new_version = await self._sample_logprobs(), await self._get_version()
        common = before.keys() & after.keys()
        gap = max((abs(before[token] - after[token]) for token in common), default=math.inf)
        if gap == 0:
            raise CheckFailed(
                "all log-probabilities are exactly those before the update; the server has the old weights"
            )
        if version is not None and version == new_version:
            raise CheckFailed(f"the server still names the weight version {version}")
        versions = "" if version is None else f", weight version {version} to {new_version}"
        return f"log-probabilities change by up to {gap:.1e}{versions}"

    def _build_rows(self) -> list[Row]:
        return [task.row() for task in islice(probe.tasks("probe"), CONVERSATIONS)]

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

    async def _sample_logprobs(self) -> dict[int, float]:
        """Return the log-probabilities of the tokens that are sampled after one prompt."""
        sampled = await asyncio.gather(*(self._model.respond(PROMPT) for _ in range(SAMPLES)))
        carriers = [response["output"][-1] for response in sampled]
        return {
            carrier[TOKEN_FIELDS[1]][0]: carrier[TOKEN_FIELDS[2]][0] for carrier in carriers if carrier[TOKEN_FIELDS[1]]
        }

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
