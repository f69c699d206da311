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
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from gymsdk import client, episode, jsonl, responses
from gymsdk.client import RemoteVerdict
from gymsdk.environment import Environment
from gymsdk.errors import BadConfig, BadRow, EpisodeError, Failed, UsageError
from gymsdk.line import (
    MASK_FIELDS,
    RESULT_FIELDS,
    ROLLOUT_INDEX,
    TASK_INDEX,
    TRAJECTORY,
    get_agent_name,
    get_environment_name,
    get_verdict_names,
    read_index,
    read_reward,
    strip_results,
)
from gymsdk.plugins import registry
from gymsdk.rollouts import remote
from gymsdk.rollouts.agent_client import convert_to_server_error
from gymsdk.rollouts.folder import FILES
from gymsdk.rollouts.jobs import Job, compute_seed
from gymsdk.rollouts.remote import HeadServers, Wanted, has_all
from gymsdk.rollouts.tasks import MAX_SAMPLED_LINES
from gymsdk.types import Budget, EndReason, Item, Row, build_agent_reference

if TYPE_CHECKING:
    from gymsdk.http.client import HttpResponse

ROLLOUTS, FAILURES, INPUTS, _, RUN = FILES

MASK = "**********"
"""What run.json holds in place of a secret."""


@dataclass(frozen=True, slots=True)
class Case:
    """A stored rollout.

    Attributes:
        number: The number of the line in its file, from 1.
        line: The line.
        environment: The environment that was played.
        sent: The row as it was sent, if the run's folder holds it.
    """

    number: int
    line: Row
    environment: str
    sent: Row | None = None

    @property
    def row(self) -> Row:
        """The row that was played.

        If only the line is known, the fields of its verdict stay: the row may have fields of the same names.
        """
        if self.sent is not None:
            return self.sent
        return strip_results({key: each for key, each in self.line.items() if key != "gymsdk"})

    @property
    def task(self) -> int:
        """The index of the task in the run; the number of the line, from 0, if the line has no index."""
        return read_index(self.line, TASK_INDEX, self.number - 1)

    @property
    def repeat(self) -> int:
        """The index of the repeat."""
        return read_index(self.line, ROLLOUT_INDEX, 0)

    @property
    def seed(self) -> int:
        """The seed of the episode: the one on the line, or else that of a run with the default seed."""
        seed = _get_int(self._host_fields.get("seed"))
        return compute_seed(0, Job(self.environment, self.task, self.repeat, self.row)) if seed is None else seed

    @property
    def reward(self) -> float | None:
        """The stored reward, or `None`."""
        return read_reward(self.line)

    @property
    def response(self) -> Item:
        """The response to verify; raises `BadRow` if there is none."""
        response = self.line.get("response")
        if not isinstance(response, dict) or not responses.is_response(response):
            raise BadRow("the line has no response to verify")
        return response

    @property
    def opening(self) -> list[Item] | None:
        """The opening messages, or `None` if the line does not hold them."""
        shown = self.line["responses_create_params"].get("input")
        return shown if self._host_fields and isinstance(shown, list) else None

    @property
    def end_reason(self) -> EndReason:
        """How the episode ended, as far as the line shows."""
        reasons: tuple[EndReason, ...] = get_args(EndReason)
        known = next((word for word in reasons if word == self._host_fields.get("ended")), None)
        return known or ("tokens" if responses.is_incomplete_response(self.response) else "done")

    @property
    def _host_fields(self) -> Item:
        host_fields = self.line.get("gymsdk")
        return host_fields if isinstance(host_fields, dict) else {}


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
        self._inputs = Inputs(home / INPUTS) if in_run_folder else None
        self._home = home if in_run_folder else None

    def iter_cases(self) -> Iterator[Case]:
        """Yield the stored rollouts; raises `BadRow` at a line that is not a rollout."""
        for number, written in jsonl.read_rows(self.path):
            line = self._addressed(written)
            name = find_environment_name(line)
            if name is None or not isinstance(line.get("responses_create_params"), dict):
                raise BadRow(
                    f"{self.path}:{number}: the line is not a rollout: it needs `responses_create_params`, and"
                    " `agent_ref.name` with the agent that played it; name the agent with --agent, or correct the line"
                )
            yield Case(number, line, name, self._inputs.get_row(line.get(TASK_INDEX)) if self._inputs else None)

    def _addressed(self, line: Row) -> Row:
        if self._agent is None or find_environment_name(line) is not None:
            return line
        return {**line, "agent_ref": build_agent_reference(self._agent)}

    def list_environments(self) -> list[str]:
        """Return the environments of the stored rollouts."""
        return list(dict.fromkeys(case.environment for case in self.iter_cases()))

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
        return path.resolve() in {each.resolve() for each in own}


class Inputs:
    """Reads the rows of a run from disk one by one: a run may have a million."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[int, int] = {}
        place = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._places.setdefault(jsonl.parse_row(line, where=str(path))[TASK_INDEX], place)
                place += len(line)

    def get_row(self, task: object) -> Row | None:
        """Return the row with the index *task*, or `None`."""
        place = self._places.get(task) if isinstance(task, int) else None
        if place is None:
            return None
        with self._path.open("rb") as file:
            file.seek(place)
            row = jsonl.parse_row(file.readline(), where=str(self._path))
        return {key: value for key, value in row.items() if key not in {TASK_INDEX, ROLLOUT_INDEX}}


def find_environment_name(line: Row) -> str | None:
    """Return the environment that a line names, or `None`."""
    host_fields = line.get("gymsdk")
    name = host_fields.get("environment") if isinstance(host_fields, dict) else None
    return name if isinstance(name, str) else get_environment_name(line)


def _get_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


STATELESS = "stateless"
"""The answer of a resources server that can verify without a session."""

Judge: TypeAlias = Callable[[Case], Awaitable[RemoteVerdict]]
"""Verifies a stored rollout; raises `EpisodeError`, and `BadRow` for an invalid row."""


@dataclass(frozen=True, slots=True)
class Reverified:
    """The result of verifying a stored rollout again: a verdict, or the kind and reason of the failure."""

    case: Case
    verdict: RemoteVerdict | None = None
    kind: str = ""
    reason: str = ""

    @property
    def new_grader(self) -> tuple[str, str] | None:
        """The stored and the new grader with their versions, if the verdict names another one; else `None`.

        The stored one is empty if the stored verdict names none.
        """
        fields = self.verdict.fields if self.verdict is not None else {}
        old, new = _get_grader(self.case.line), _get_grader(fields)
        return (old, new) if new and old != new else None

    @property
    def changed(self) -> bool:
        """Whether the reward differs from the stored one."""
        if self.verdict is None:
            return False
        old = self.case.reward
        return old is None or not math.isclose(old, self.verdict.reward, rel_tol=1e-9, abs_tol=1e-12)

    def build_line(self) -> Row | None:
        """Return the line with the new verdict, or `None` if there is no verdict."""
        if self.verdict is None:
            return None
        before = self.case.line
        host_fields = before.get("gymsdk")
        names = get_verdict_names(before) or ()
        stale = {
            *names,
            *(RESULT_FIELDS - {"response", TRAJECTORY, "gymsdk"}),
            *MASK_FIELDS,
            "failure_kind",
            "failure_reason",
        }
        kept = {key: each for key, each in before.items() if key not in stale and not key.startswith("_ng_failure_")}
        sent = self.case.sent or {}
        row = {name: sent[name] for name in names if name in sent}
        parts = {"reward_components": self.verdict.components} if self.verdict.components else {}
        line = {**kept, **row, **self.verdict.fields, "reward": self.verdict.reward, **parts}
        if isinstance(host_fields, dict):
            stored = {"stored_reward": self.case.reward} if self.changed and self.case.reward is not None else {}
            line["gymsdk"] = {**host_fields, **stored, "outcome": "scored", "verdict": list(self.verdict.fields)}
        return line


def _get_grader(fields: Mapping[str, Any]) -> str:
    """Return the grader and its version that a verdict names; empty if it names none."""
    grader, version = fields.get("grader"), fields.get("grader_version")
    return f"{grader} {version}".strip() if isinstance(grader, str) and isinstance(version, str) else ""


async def reverify(cases: Iterable[Case], judge: Judge, *, concurrency: int) -> AsyncGenerator[Reverified, None]:
    """Verify every case, *concurrency* concurrently, and yield the results in order."""
    pending: deque[asyncio.Task[Reverified]] = deque()
    try:
        for case in cases:
            if len(pending) >= concurrency:
                yield await pending.popleft()
            pending.append(asyncio.ensure_future(_judge(case, judge)))
        while pending:
            yield await pending.popleft()
    finally:
        for each in pending:
            each.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _judge(case: Case, judge: Judge) -> Reverified:
    try:
        return Reverified(case, await judge(case))
    except BadRow as error:
        return Reverified(case, kind="bad_row", reason=str(error))
    except EpisodeError as error:
        return Reverified(case, kind=error.kind, reason=str(error))


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

    async def judge(case: Case) -> RemoteVerdict:
        return await _judge_locally(environments[case.environment], case)

    async with AsyncExitStack() as opened:
        for each in environments.values():
            await opened.enter_async_context(each)
        yield judge


def _load_environment(name: str, stored: Mapping[str, Any], overrides: Mapping[str, Any]) -> Environment:
    """Load *name* with the stored settings that it still has, and with those *overrides*."""
    try:
        known = set(type(registry.load(name).config).model_fields)
    except BadConfig:
        known = set(stored)
    return registry.load(name, **{**{key: stored[key] for key in stored if key in known}, **overrides})


async def _judge_locally(environment: Environment, case: Case) -> RemoteVerdict:
    verdict_outcome = await episode.verify_transcript(
        environment,
        case.row,
        case.response["output"],
        seed=case.seed,
        repeat=case.repeat,
        ended=case.end_reason,
        opening=case.opening,
        seconds=Budget().seconds,
    )
    return RemoteVerdict(verdict_outcome.reward, verdict_outcome.components, verdict_outcome.fields)


def build_remote_judge(servers: HeadServers) -> Judge:
    """Return a function that verifies on the resources servers *servers*, without a session."""

    async def judge(case: Case) -> RemoteVerdict:
        name = servers.get_resources_for_row(case.line, case.environment)
        stamps = {key: case.line[key] for key in (TASK_INDEX, ROLLOUT_INDEX) if key in case.line}
        host_fields = {"seed": case.seed, "repeat": case.repeat, "ended": case.end_reason}
        body = {**case.row, **stamps, "response": case.response, "gymsdk": host_fields}
        try:
            answer = await servers.client.post(name, "/verify", json=body)
        except Failed as error:
            raise convert_to_server_error(error) from error
        return client.parse_verdict(remote.parse_response_row(answer, "verify"), case.row)

    return judge


def list_wanted(run: StoredRun) -> list[Wanted]:
    """Return the agents and environments of the first `MAX_SAMPLED_LINES` rollouts of *run*."""
    return list(
        dict.fromkeys(
            (get_agent_name(case.line), case.environment) for case in islice(run.iter_cases(), MAX_SAMPLED_LINES)
        )
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
        servers.get_resources_for_row(case.line, case.environment) for case in run.iter_cases()
    )
    unsure = [
        name for name in expected_names if _parse_mode(await servers.client.get(name, "/reverify_mode")) != STATELESS
    ]
    if unsure and not force:
        named = ", ".join(map(repr, unsure))
        raise UsageError(
            f"the resources server {named} does not declare that it verifies without a session, so that rewards may"
            " change for this reason alone; use it anyway with --force"
        )
    return unsure


def _parse_mode(answer: HttpResponse) -> object:
    return client.parse_value(answer) if answer.ok else None
