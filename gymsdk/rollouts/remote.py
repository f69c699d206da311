"""Delivery: jobs played by running servers, ours or NeMo Gym's, each posted to the agent that its row names."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from uuid import uuid4

from pydantic import ValidationError

from gymsdk import client, credentials, jsonl, responses, types
from gymsdk.client import MISSING_STATUSES, VERSION_KEY, ServerClient, UnknownServer
from gymsdk.episode import Budget
from gymsdk.errors import EpisodeError, Failed, Unscorable, convert_error, format_suggestion
from gymsdk.http import client as http
from gymsdk.http.client import MAX_EXCERPT_CHARS, HttpResponse
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.rollouts import folder
from gymsdk.rollouts.folder import StoredVerdict
from gymsdk.rollouts.jobs import Job, agent, seed_of
from gymsdk.rollouts.retry import Played, guarded, settled, unscored
from gymsdk.types import AGENT_SUFFIX, Item, Rollout, Row, Timing

UNFIT = 422
"""The status that says that the data, and not the server, is at fault."""


def object_of(answer: HttpResponse, stage: str) -> Row:
    """Give the row *answer* holds; raises `EpisodeError` where it is a refusal, or no row."""
    if not answer.ok:
        raise refused(answer, stage)
    return client.parse_object(answer, stage)


def refused(answer: HttpResponse, stage: str) -> EpisodeError:
    """Give the failure that a refusal means: the one it tells of, or else what its status says."""
    if answer.status != UNFIT or client.parse_failure(answer) is not None:
        return client.build_failure(answer, stage)
    return Failed(f"{answer.host}: {_detail(answer)}", kind="bad_row", stage="reset")


def _detail(answer: HttpResponse) -> str:
    """Give a refusal's sentence, or else what there is of its text."""
    said = client.parse_value(answer)
    detail = said.get("detail") if isinstance(said, dict) else None
    return detail if isinstance(detail, str) else f"answered {answer.status}: {answer.text[:MAX_EXCERPT_CHARS]}"


def rollout(body: Row, job: Job, seed: int, *, milliseconds: float) -> Rollout:
    """Give the rollout of *job* that *body* tells of; raises `EpisodeError` where it cannot be read."""
    try:
        found = _ours(body, job) if client.is_gymsdk_result(body) else _theirs(body, job, seed, milliseconds)
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        raise client.build_bad_answer_error(
            f"the server's rollout cannot be read: {type(error).__name__}: {error}", "verify"
        ) from error
    asked = {"id": job.id, "environment": job.environment, "row": job.row, "seed": seed, "repeat": job.repeat}
    return found.model_copy(update=asked)


def _ours(body: Row, job: Job) -> Rollout:
    client.parse_verdict(body, job.row)
    return folder.read(body)


def _theirs(body: Row, job: Job, seed: int, milliseconds: float) -> Rollout:
    """Give the rollout of a line that has nothing of ours: what NeMo Gym leaves unsaid is read off the response."""
    played = _played(body, job, milliseconds)
    try:
        judged = client.parse_verdict(body, job.row)
    except Unscorable as error:
        return unscored(job, seed, error).model_copy(update=played)
    return Rollout(
        id=job.id,
        environment=job.environment,
        row=job.row,
        seed=seed,
        outcome="scored",
        reward=judged.reward,
        components=judged.components,
        verdict=StoredVerdict(**{**judged.fields, "reward": judged.reward, "components": judged.components}),
    ).model_copy(update=played)


def _played(body: Row, job: Job, milliseconds: float) -> dict[str, Any]:
    response = body.get("response")
    if not isinstance(response, dict) or not responses.is_response(response):
        raise client.build_bad_answer_error(
            f"the server's rollout has no Response object: {str(response)[:MAX_EXCERPT_CHARS]}", "verify"
        )
    params = {**job.row["responses_create_params"], **(body.get("responses_create_params") or {})}
    asked = len(list(responses.iter_turn_spans(response["output"])))
    return {
        "ended": "tokens" if responses.is_incomplete_response(response) else "done",
        "opening": _items(params["input"]),
        "tools": params.get("tools") or [],
        "response": response,
        "turns": asked,
        "usage": {"policy": types.parse_usage(response).model_copy(update={"calls": asked})},
        "timing": Timing(total=round(milliseconds, 3)),
    }


def _items(prompt: str | list[Item]) -> list[Item]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


Wanted: TypeAlias = tuple[str | None, str]
"""The agent that a row names, if any, and the row's environment."""

log = logging.getLogger("gymsdk")


@dataclass(frozen=True, slots=True)
class Served:
    """What *client*'s head knows: the agents, each with its resources server where that is named, and all of those.

    The *model* that plays, the *version* of gymsdk and those of the environments are there where the head tells them.
    """

    client: ServerClient
    agents: Mapping[str, str | None]
    resources: frozenset[str]
    model: str | None = None
    version: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def plays_once(self) -> bool:
        """Whether a row that comes twice under one id is played once: what gymsdk's servers do."""
        return self.version is not None

    def identity(self) -> Row:
        """Give what decides what is played there, as far as the head tells."""
        return {"model": self.model, "gymsdk": self.version, "versions": dict(self.versions)}

    def agent_of(self, row: Row, environment: str) -> str:
        """Give the agent that plays *row* of *environment*: the one it names, or the one called as ours are.

        Raises `Unknown` where the head knows neither.
        """
        return self.agent_named(agent(row), environment)

    def agent_named(self, named: str | None, environment: str) -> str:
        """Give the agent that plays rows of *environment* that are for the one so *named*, like `agent_of`."""
        wanted = environment + AGENT_SUFFIX
        for name in (named, wanted):
            if name is not None and name in self.agents:
                return name
        raise self._unknown(named or wanted)

    def checked(self, environments: Sequence[str]) -> None:
        """Refuse to play *environments* of which one has no agent; raises `Unknown`."""
        if lost := self.without_agent(environments):
            raise self._unknown(lost[0] + AGENT_SUFFIX)

    def without_agent(self, environments: Sequence[str]) -> list[str]:
        """Give those of *environments* that no agent plays."""
        return [name for name in environments if name + AGENT_SUFFIX not in self.agents and name not in self.agents]

    def resources_of(self, row: Row, environment: str) -> str:
        """Give the resources server that judges *row* of *environment*; raises `Unknown` where the head knows none."""
        return self.resources_named(agent(row), environment)

    def resources_named(self, named: str | None, environment: str) -> str:
        """Give the resources server that judges rows of *environment* for the agent so *named*, like `resources_of`."""
        for name in (self.agents.get(named or environment + AGENT_SUFFIX), environment):
            if name is not None and name in self.resources:
                return name
        near = format_suggestion(environment, self.resources, f"its: {', '.join(sorted(self.resources)) or 'none'}")
        raise self._missing(f"resources server of {environment!r}{near}")

    def _unknown(self, name: str) -> UnknownServer:
        near = format_suggestion(name, self.agents, f"its agents: {', '.join(self.agents) or 'none'}")
        return self._missing(f"agent {name!r}{near}")

    def _missing(self, what: str) -> UnknownServer:
        return UnknownServer(f"{http.get_host(self.client.head)} knows no {what}")


async def served(head: str, wanted: Callable[[Served], bool] = lambda _: True) -> Served:
    """Give what the head at a URL knows: one that has just begun, once it knows all that is *wanted*, or has settled.

    Raises `UsageError` where it is no URL, `Failed` where no head answers.
    """
    head = credentials.check_head_url(head)
    asking, client = ServerClient(head, seconds=30.0, retry=http.Retry(times=1)), ServerClient(head)
    return _known(client, await asking.wait_for_config(lambda config: wanted(_known(client, config))))


def _known(client: ServerClient, config: Mapping[str, Any]) -> Served:
    agents = {name: _resources(block) for name, block in _blocks(config, "responses_api_agents")}
    judges = dict(_blocks(config, "resources_servers"))
    return Served(
        client,
        agents,
        frozenset(judges),
        model=_word(config.get("policy_model_name")),
        version=_word(config.get(VERSION_KEY)),
        versions={name: told for name, each in judges.items() if (told := _word(_field(each, "version")))},
    )


def _field(block: object, name: str) -> object:
    return block.get(name) if isinstance(block, dict) else None


def _word(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _blocks(config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, Any]]:
    for name, block in config.items():
        implementations = block.get(kind) if isinstance(block, dict) else None
        if isinstance(implementations, dict):
            yield from ((str(name), each) for each in implementations.values())


def _resources(block: object) -> str | None:
    return _word(_field(_field(block, "resources_server"), "name"))


@dataclass(frozen=True, slots=True)
class Distant:
    """An environment that is not installed here: *name*, played by *agent*, whose figures the servers know."""

    name: str
    agent: str
    client: ServerClient

    async def metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Give the environment's own figures over scored *rollouts*; raises `EpisodeError`."""
        sent = {"verify_responses": [_trimmed(rollout) for rollout in rollouts]}
        answer = await self.client.post(self.agent, "/aggregate_metrics", json=sent)
        if answer.status in MISSING_STATUSES:
            return {}
        body = object_of(answer, "metrics")
        found, complaint = body.get("key_metrics"), body.get("complaint")
        if isinstance(complaint, str):
            log.warning("%s: %s", self.name, complaint)
        return {
            name: value
            for name, value in (found.items() if isinstance(found, dict) else ())
            if not name.startswith("mean/") and isinstance(value, (int, float))
        }


def all_known(find: Callable[[str | None, str], str], wanted: Iterable[Wanted]) -> bool:
    """Whether *find*, of those served, gives a server for each that is *wanted*."""
    try:
        for named, environment in wanted:
            find(named, environment)
    except UnknownServer:
        return False
    return True


def _trimmed(rollout: Rollout) -> Row:
    """Give a rollout's line without what is said in it, of which figures take nothing but the usage."""
    task, _, repeat = rollout.id.partition(":")
    line = folder.scored(rollout, (int(task), int(repeat)))
    usage = (line.pop("response") or {}).get("usage")
    line.pop("responses_create_params")
    return {**line, "response": {"usage": usage}}


AGAIN = 2
"""How often a row is sent once more whose answer was lost: under one id a server of ours plays it once."""

COMING = 10.0
"""Seconds that a row waits for an agent that the head does not know just now."""

LOOKING = 1.0
"""Seconds between two looks for it."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """How jobs are played elsewhere: by whom *client* knows, each within *budget* and answered within *seconds*.

    *name* begins the ids of its rollouts, which nobody else uses; the servers play a row *once* that comes twice
    under one of them, or are not known to. *retry* is how often one that is not there is looked for, for
    *coming* seconds where the head does not know it.
    """

    client: ServerClient
    seed: int = 0
    budget: Budget = field(default_factory=Budget)
    attempts: int = 3
    seconds: float = 900.0
    name: str = field(default_factory=lambda: f"r{uuid4().hex[:16]}")
    once: bool = False
    retry: http.Retry = http.DEFAULT_RETRY
    coming: float = COMING

    @property
    def connections(self) -> int:
        """Count the request by which the servers play a job."""
        return 1

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Open nothing: the servers are."""
        yield

    async def __call__(self, job: Job) -> Played:
        """Have *job* played until it has been judged, cannot be, or has been tried often enough."""
        return await settled(job, self.tried, attempts=self.attempts)

    async def tried(self, job: Job, attempt: int) -> Rollout:
        """Have *job* played one time, and give what came of it."""
        rollout = await guarded(job, seed_of(self.seed, job), self._played(job, attempt))
        return rollout.model_copy(update={"rollout_id": self._id(job, attempt)})

    async def _played(self, job: Job, attempt: int) -> Rollout:
        began = time.perf_counter()
        body = object_of(await self._delivered(agent(job.row) or "", self._body(job, attempt)), "host")
        spent = (time.perf_counter() - began) * 1e3
        return rollout(body, job, seed_of(self.seed, job), milliseconds=spent)

    def _body(self, job: Job, attempt: int) -> Row:
        ours = {"seed": seed_of(self.seed, job), "repeat": job.repeat, "budget": self.budget.model_dump()}
        return {
            **job.row,
            TASK_INDEX: job.task,
            ROLLOUT_INDEX: job.repeat,
            "_ng_rollout_id": self._id(job, attempt),
            "gymsdk": ours,
        }

    def _id(self, job: Job, attempt: int) -> str:
        return f"{self.name}.{job.task}.{job.repeat}.{attempt}"

    async def _delivered(self, name: str, row: Row) -> HttpResponse:
        """Give what the agent *name* answers to *row*; sent once more where it is not played twice. Raises `Failed`."""
        loop, body = asyncio.get_running_loop(), jsonl.dump_portable_json(row)
        deadline = loop.time() + self.seconds
        for number in range(AGAIN + 1):
            url = await self._url(name)
            try:
                left = max(0.001, deadline - loop.time())
                carried = self.client.build_headers_for(url)
                return await http.post(url + "/run", body, headers=carried, timeout=left, retry=self.retry, once=True)
            except Failed as error:
                if error.kind == "model_unreachable":
                    self.client.forget(name, url)
                again = error.kind == "model_unreachable" and (self.once or isinstance(error, http.NotSent))
                if number == AGAIN or not again or loop.time() >= deadline:
                    raise of_server(error) from error
            await asyncio.sleep(
                min(self.retry.get_wait_seconds(number), max(0.0, deadline - loop.time())) * random.random()
            )
        raise AssertionError("the last time either answers or raises")

    async def _url(self, name: str) -> str:
        """Give where the agent *name* is; one that is not there may be about to be started anew. Raises `Failed`."""
        clock = asyncio.get_running_loop().time
        until = clock() + self.coming
        while True:
            try:
                return await self.client.url(name)
            except UnknownServer:
                if clock() >= until:
                    raise
            except Failed as error:
                raise of_server(error) from error
            await asyncio.sleep(random.uniform(LOOKING / 2, LOOKING))


def of_server(error: Failed) -> Failed:
    """Give the failure to reach a server as that, and not as a model's."""
    found = convert_error(error, Failed, kind=error.kind.replace("model_", "server_", 1))
    found.stage = "host"
    return found
