"""Verify stored rollouts again, in this process or on running servers, and report which rewards change."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, get_args

from gymsdk import client, episode, jsonl, line, responses
from gymsdk.client import RemoteVerdict
from gymsdk.environment import Environment
from gymsdk.errors import BadConfig, BadRow, EpisodeError, Failed, UsageError
from gymsdk.line import ROLLOUT_INDEX, TASK_INDEX, StoredRollout
from gymsdk.plugins import registry
from gymsdk.request_options import RequestOptions
from gymsdk.rollouts import remote
from gymsdk.rollouts.agent_client import convert_to_server_error
from gymsdk.rollouts.folder import FILES
from gymsdk.rollouts.inputs import InputIndex
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.remote import HeadServers, Wanted, has_all
from gymsdk.rollouts.tasks import MAX_SAMPLED_LINES
from gymsdk.types import Budget, EndReason, Item, Row, build_agent_reference

ROLLOUTS, FAILURES, INPUTS, _, RUN = FILES

MASK = "**********"
"""What run.json holds in place of a secret."""


class StoredRun:
    """Stored rollouts: the folder of a run, or a file of their lines.

    Args:
        path: The folder or the file.
        agent: The agent of the rollouts that name none.

    Raises:
        BadRow: The file does not exist.
    """

    def __init__(self, path: Path, *, agent: str | None = None) -> None:
        self._agent = agent
        self.path = path / ROLLOUTS if path.is_dir() else path
        if not self.path.is_file():
            raise BadRow(f"{self.path} does not exist; name the folder of a run, or a file of rollouts")
        home = self.path.parent
        in_run_folder = self.path.name in {ROLLOUTS, FAILURES} and (home / RUN).is_file() and (home / INPUTS).is_file()
        self._inputs = InputIndex(home / INPUTS).read() if in_run_folder else None
        self._home = home if in_run_folder else None

    def iter_rollouts(self) -> Iterator[StoredRollout]:
        """Yield the stored rollouts; raises `BadRow` at a line that is not a rollout."""
        for stored in line.read(self.path, is_failure=self.path.name == FAILURES):
            if self._agent is not None and not stored.environment:
                stored.line = {**stored.line, "agent_ref": build_agent_reference(self._agent)}
            if not stored.environment or not isinstance(stored.line.get("responses_create_params"), dict):
                raise BadRow(
                    f"{self.path}:{stored.number + 1}: the line is not a rollout: it needs `responses_create_params`,"
                    " and `agent_ref.name` with the agent that played it; name the agent with --agent, or correct the"
                    " line"
                )
            if self._inputs is not None:
                stored.sent = self._inputs.find(*stored.key)
            yield stored

    def list_environments(self) -> list[str]:
        """Return the environments of the stored rollouts."""
        return list(dict.fromkeys(stored.environment for stored in self.iter_rollouts()))

    def read_settings(self, environment: str) -> dict[str, Any]:
        """Return the settings with which *environment* was played, without secrets, if the run's folder holds them."""
        if self._home is None:
            return {}
        try:
            about = jsonl.parse_json((self._home / RUN).read_bytes())
            settings: Mapping[str, Any] = about["settings"]["environments"][environment]["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {name: value for name, value in settings.items() if value != MASK}

    def contains(self, path: Path) -> bool:
        """Return whether *path* is a file of the stored run."""
        own = [self.path, *((self._home / name for name in FILES) if self._home else ())]
        return path.resolve() in {file.resolve() for file in own}


STATELESS = "stateless"
"""The answer of a resources server that can verify without a session."""

Judge: TypeAlias = Callable[[StoredRollout], Awaitable[RemoteVerdict]]
"""Verifies a stored rollout; raises `EpisodeError`, and `BadRow` for an invalid row."""


@dataclass(frozen=True, slots=True)
class Reverified:
    """The result of verifying a stored rollout again: a verdict, or the kind and reason of the failure."""

    stored: StoredRollout
    verdict: RemoteVerdict | None = None
    kind: str = ""
    reason: str = ""

    @property
    def new_grader(self) -> tuple[str, str] | None:
        """The stored and the new grader with their versions, if the verdict names another one; else `None`.

        The stored one is empty if the stored verdict names none.
        """
        fields = self.verdict.fields if self.verdict is not None else {}
        old, new = _get_grader(self.stored.line), _get_grader(fields)
        return (old, new) if new and old != new else None

    @property
    def changed(self) -> bool:
        """Whether the reward differs from the stored one."""
        if self.verdict is None:
            return False
        old = self.stored.reward
        return old is None or not math.isclose(old, self.verdict.reward, rel_tol=1e-9, abs_tol=1e-12)

    def build_line(self) -> Row | None:
        """Return the line with the new verdict, or `None` if there is no verdict."""
        if self.verdict is None:
            return None
        verdict = self.verdict
        return self.stored.regrade(
            verdict.reward, verdict.components, verdict.fields, verdict.record, changed=self.changed
        )


def _get_grader(fields: Mapping[str, Any]) -> str:
    """Return the grader and its version that a verdict names; empty if it names none."""
    grader, version = fields.get("grader"), fields.get("grader_version")
    return f"{grader} {version}".strip() if isinstance(grader, str) and isinstance(version, str) else ""


def _get_seed(stored: StoredRollout) -> int:
    """Return the seed of the episode: the one on the line, or else that of a run with the default seed."""
    job = Job(stored.environment, *stored.key, {})
    return job.compute_seed(0) if stored.seed is None else stored.seed


def _get_response(stored: StoredRollout) -> Item:
    """Return the response to verify; raises `BadRow` if there is none."""
    if not responses.is_response(stored.response):
        raise BadRow("the line has no response to verify")
    return stored.response


def _get_end_reason(stored: StoredRollout) -> EndReason:
    """Return how the episode ended, as far as the line shows."""
    reasons: tuple[EndReason, ...] = get_args(EndReason)
    known = next((reason for reason in reasons if reason == stored.ended), None)
    return known or ("tokens" if responses.is_incomplete_response(_get_response(stored)) else "done")


async def reverify(
    rollouts: Iterable[StoredRollout], judge: Judge, *, concurrency: int
) -> AsyncGenerator[Reverified, None]:
    """Verify every rollout, *concurrency* concurrently, and yield the results in order."""
    pending: deque[asyncio.Task[Reverified]] = deque()
    try:
        for stored in rollouts:
            if len(pending) >= concurrency:
                yield await pending.popleft()
            pending.append(asyncio.ensure_future(_judge(stored, judge)))
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _judge(stored: StoredRollout, judge: Judge) -> Reverified:
    try:
        return Reverified(stored, await judge(stored))
    except BadRow as error:
        return Reverified(stored, kind="bad_row", reason=str(error))
    except EpisodeError as error:
        return Reverified(stored, kind=error.kind, reason=str(error))


@asynccontextmanager
async def open_local_judge(run: StoredRun, overrides: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[Judge]:
    """Open the installed environments of a stored *run* and yield a function that verifies with them.

    Args:
        run: The stored run.
        overrides: Settings by environment, which override the stored ones.

    Raises:
        UsageError: An environment is not installed, or rejects the settings.
    """
    environments = {
        name: _load_environment(name, run.read_settings(name), settings) for name, settings in overrides.items()
    }

    async def judge(stored: StoredRollout) -> RemoteVerdict:
        return await _judge_locally(environments[stored.environment], stored)

    async with AsyncExitStack() as opened:
        for environment in environments.values():
            await opened.enter_async_context(environment)
        yield judge


def _load_environment(name: str, stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> Environment:
    """Load *name* with the stored settings that it still has, and with those *overrides*."""
    try:
        known = set(type(registry.load(name).config).model_fields)
    except BadConfig:
        known = set(stored)
    return registry.load(name, **{**{key: stored[key] for key in stored if key in known}, **overrides})


async def _judge_locally(environment: Environment, stored: StoredRollout) -> RemoteVerdict:
    shown = stored.params.get("input")
    verdict_outcome = await episode.verify_transcript(
        environment,
        stored.row,
        _get_response(stored)["output"],
        seed=_get_seed(stored),
        repeat=stored.repeat,
        ended=_get_end_reason(stored),
        # The prompt of a line of another program lacks the messages that `reset` adds.
        opening=shown if stored.has_host_fields and isinstance(shown, list) else None,
        seconds=Budget().seconds,
    )
    return RemoteVerdict(
        verdict_outcome.reward, verdict_outcome.components, verdict_outcome.fields, verdict_outcome.record
    )


def build_remote_judge(servers: HeadServers) -> Judge:
    """Return a function that verifies on the resources servers *servers*, without a session."""

    async def judge(stored: StoredRollout) -> RemoteVerdict:
        name = servers.get_resources_for_row(stored.line, stored.environment)
        stamps = {key: stored.line[key] for key in (TASK_INDEX, ROLLOUT_INDEX) if key in stored.line}
        options = RequestOptions(_get_seed(stored), stored.repeat, _get_end_reason(stored))
        body = {**stored.row, **stamps, "response": _get_response(stored), **options.to_field()}
        try:
            answer = await servers.client.post(name, "/verify", json=body)
        except Failed as error:
            raise convert_to_server_error(error) from error
        return client.parse_verdict(remote.parse_response_row(answer, "verify"), stored.row)

    return judge


def list_wanted(run: StoredRun) -> list[Wanted]:
    """Return the agents and environments of the first `MAX_SAMPLED_LINES` rollouts of *run*."""
    return list(
        dict.fromkeys((stored.agent, stored.environment) for stored in islice(run.iter_rollouts(), MAX_SAMPLED_LINES))
    )


def has_judges(servers: HeadServers, wanted: Iterable[Wanted]) -> bool:
    """Return whether *servers* have the resources servers for all agents and environments in *wanted*."""
    return has_all(servers.get_resources, wanted)


async def list_sessionless(servers: HeadServers, run: StoredRun, *, force: bool) -> list[str]:
    """Return the resources servers of *run* that do not declare that they verify without a session.

    Raises:
        UsageError: There is such a server, and *force* is not set.
    """
    expected_names = dict.fromkeys(
        servers.get_resources_for_row(stored.line, stored.environment) for stored in run.iter_rollouts()
    )
    unsure = [
        name
        for name in expected_names
        if not (answer := await servers.client.get(name, "/reverify_mode")).ok
        or client.parse_value(answer) != STATELESS
    ]
    if unsure and not force:
        named = ", ".join(map(repr, unsure))
        raise UsageError(
            f"the resources server {named} does not declare that it verifies without a session, so that rewards may"
            " change for this reason alone; use it anyway with --force"
        )
    return unsure
