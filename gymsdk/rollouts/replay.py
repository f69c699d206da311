"""Replay stored rollouts against their environments, and continue them in another way from any turn.

A replay is an ordinary episode of the same row with the same seed, whose model says the stored turns. The items of the
environment are compared with the stored ones: an environment that answers differently has changed, or is not
deterministic. A branch replays the first turns and then says something else, or asks another model.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymsdk import jsonl
from gymsdk.environment import Environment
from gymsdk.episode import play
from gymsdk.errors import Failed, UsageError
from gymsdk.line import StoredRollout, build_line, strip_results
from gymsdk.responses import build_message, build_response, iter_turn_spans, query_model
from gymsdk.rollouts.folder import RunFolder
from gymsdk.rollouts.jobs import build_input_row, compute_task_digest
from gymsdk.rollouts.plan import Plan, build_settings, describe_start
from gymsdk.types import Budget, Episode, Item, Model, Rollout, Row, find_invalid_field, is_policy_item
from gymsdk.working_folder import shorten_path

DIVERGED = "replay_diverged"
"""The kind of failure of a replay in which the environment answered differently."""

IGNORED_FIELDS = frozenset({"id", "status"})
"""The fields of an item that may differ between two plays."""


@dataclass(frozen=True)
class StoredEpisode:
    """A stored rollout that can be replayed.

    Attributes:
        id: The rollout, `TASK:REPEAT`.
        environment: The name of the environment.
        row: The row as it was sent.
        seed: The seed of the episode.
        repeat: The index of the repeat.
        task: The index of the task in the run.
        opening: The items before the first turn.
        items: The items of the episode.
        ended: Why the episode ended.
        reward: The stored reward; `None` without one.
        components: The components of the reward.
    """

    id: str
    environment: str
    row: Row
    seed: int
    repeat: int
    task: int
    opening: list[Item]
    items: list[Item]
    ended: str | None
    reward: float | None
    components: dict[str, float]

    @property
    def turns(self) -> list[list[Item]]:
        """The items of each turn of the policy."""
        return [self.items[span] for span in iter_turn_spans(self.items)]


@dataclass(frozen=True)
class Branch:
    """How a replay continues differently.

    Attributes:
        turn: The number of stored turns that are said before.
        edited: The items of the turn that is said instead of the next stored one; empty for none.
        model: The model that plays on; `None` if the stored turns are said to their end.
    """

    turn: int
    edited: Sequence[Item] = ()
    model: Model | None = None


@dataclass(frozen=True)
class Replayed:
    """A replayed rollout.

    Attributes:
        stored: The stored rollout.
        rollout: The new one.
        diverged: The index of the first item of the environment that differs; `None` if none does.
    """

    stored: StoredEpisode
    rollout: Rollout
    diverged: int | None

    @property
    def is_equal(self) -> bool:
        """Whether no item differs, and the reward is the same."""
        return self.diverged is None and self.rollout.reward == self.stored.reward


def parse_episode(stored: StoredRollout) -> StoredEpisode:
    """Return the episode of a stored rollout.

    Raises:
        UsageError: gymsdk did not play the rollout, or it has no response.
    """
    if stored.seed is None:
        raise UsageError("only rollouts that gymsdk has played can be replayed: the line names no seed")
    if not stored.response:
        raise UsageError(f"rollout {stored.id} has no response, so that there is nothing to replay")
    task, repeat = stored.key
    return StoredEpisode(
        id=stored.id,
        environment=stored.environment,
        row=stored.sent or strip_results(stored.line),
        seed=stored.seed,
        repeat=repeat,
        task=task,
        opening=stored.opening,
        items=stored.response["output"],
        ended=stored.ended,
        reward=stored.reward,
        components=stored.components,
    )


class ReplayModel:
    """A model that says the stored turns of an episode, then those of a branch.

    Args:
        stored: The stored episode.
        branch: How it continues differently; by default all stored turns are said.
        force: Go on after the environment has answered differently.

    Attributes:
        diverged: The index of the first item of the environment that differs, in the whole conversation.
    """

    def __init__(self, stored: StoredEpisode, branch: Branch | None = None, *, force: bool = False) -> None:
        self._stored = stored
        self._branch = branch
        self._force = force
        self._turns = stored.turns[: branch.turn] if branch else stored.turns
        self._said = 0
        self.diverged: int | None = None

    async def respond(self, request: Item, *, episode: Episode | None = None) -> Item:
        """Compare the conversation with the stored one, and say the next turn."""
        history: list[Item] = request["input"]
        if self._said <= len(self._turns):
            self._check(history)
        self._said += 1
        if self._said <= len(self._turns):
            is_cut = self._stored.ended == "tokens" and self._said == len(self._stored.turns)
            return build_response(
                self._turns[self._said - 1],
                model="replay",
                status="incomplete" if is_cut else "completed",
                reason="max_output_tokens" if is_cut else None,
                request=request,
            )
        branch = self._branch
        if branch is not None and branch.edited and self._said == len(self._turns) + 1:
            return build_response(list(branch.edited), model="edited", request=request)
        if branch is not None and branch.model is not None:
            return await query_model(branch.model, request, episode=episode)
        raise Failed(
            f"the stored rollout ends after {len(self._turns)} turns, but the environment goes on",
            kind=DIVERGED,
            stage="model",
        )

    def find_difference(self, history: Sequence[Item]) -> tuple[int, Item, Item | None] | None:
        """Return the first item of the environment in *history* that differs, with its index and the stored item."""
        stored = [*self._stored.opening, *self._stored.items]
        for number, item in enumerate(history):
            expected = stored[number] if number < len(stored) else None
            if not (is_policy_item(item) or (expected is not None and _strip(item) == _strip(expected))):
                self.diverged = number
                return number, item, expected
        return None

    def _check(self, history: Sequence[Item]) -> None:
        if self.diverged is not None:
            return
        found = self.find_difference(history)
        if found is not None and not self._force:
            number, item, expected = found
            raise Failed(
                f"diverged at item {number}: the environment answered {_excerpt(item)}, and {_excerpt(expected)} is"
                " stored; continue with --force",
                kind=DIVERGED,
                stage="model",
            )


async def replay(
    environment: Environment,
    stored: StoredEpisode,
    branch: Branch | None = None,
    *,
    budget: Budget | None = None,
    force: bool = False,
) -> Replayed:
    """Play a stored episode again.

    Args:
        environment: The environment, with the settings of the run.
        stored: The stored episode.
        branch: How it continues differently.
        budget: The limits of the episode.
        force: Go on after the environment has answered differently.
    """
    model = ReplayModel(stored, branch, force=force)
    row = {key: value for key, value in stored.row.items() if not key.startswith("_ng_")}
    rollout = await play(environment, model, row, seed=stored.seed, repeat=stored.repeat, id=stored.id, budget=budget)
    if branch is None and model.diverged is None and rollout.failure is None and rollout.response is not None:
        # No call of the model follows the last outputs of the environment.
        model.find_difference([*rollout.opening, *rollout.response["output"]])
    return Replayed(stored, rollout, model.diverged)


@asynccontextmanager
async def open_environments(environments: Sequence[Environment]) -> AsyncIterator[None]:
    """Enter the environments, which may hold resources."""
    async with AsyncExitStack() as stack:
        for environment in environments:
            await stack.enter_async_context(environment)
        yield


def read_turn(path: Path) -> list[Item]:
    """Return the turn in a file; see `parse_turn`.

    Raises:
        UsageError: The file cannot be read, or its items are not those of a policy.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{shorten_path(path)}: {error.strerror}; name a file with the turn to say") from error
    return parse_turn(data, where=str(shorten_path(path)))


def parse_turn(data: bytes, *, where: str) -> list[Item]:
    """Return the turn in *data*: JSON with an item or a list of items, otherwise the text of a reply.

    Args:
        data: JSON or text.
        where: What *data* is, for errors.

    Raises:
        UsageError: The items are not those of a policy.
    """
    try:
        value = jsonl.parse_json(data)
    except ValueError:
        return [build_message(data.decode("utf-8", "replace").rstrip("\n"))]
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, dict) for item in items):
        raise UsageError(f"{where}: expected the items of a turn: an object, or a list of objects")
    if invalid := find_invalid_field(items, "items"):
        raise UsageError("{}: `{}` must be {}".format(where, *invalid))
    if any(not is_policy_item(item) for item in items):
        raise UsageError(
            f"{where}: a turn has replies, reasoning and tool calls only; the outputs of tools come from the"
            " environment"
        )
    return items


def write_branches(folder: RunFolder, plan: Plan, replays: Sequence[Replayed], source: str, branch: Branch) -> None:
    """Write the branches of one stored rollout as a run, whose lines name their origin in `gymsdk.branch`.

    Args:
        folder: The folder, locked.
        plan: The environment, its settings and the model, for `run.json`.
        replays: The replays, one for each repeat.
        source: The name of the run with the stored rollout.
        branch: The branch.
    """
    inputs = [
        build_input_row(
            replayed.stored.row, environment=replayed.stored.environment, task=replayed.stored.task, repeat=repeat
        )
        for repeat, replayed in enumerate(replays)
    ]
    folder.start(settings=build_settings(plan, {}), about=describe_start(plan, []), inputs=inputs)
    for repeat, replayed in enumerate(replays):
        key = (replayed.stored.task, repeat)
        rollout = replayed.rollout.model_copy(update={"id": f"{replayed.stored.task}:{repeat}"})
        is_failed = rollout.failure is not None
        origin = {"run": source, "id": replayed.stored.id, "turn": branch.turn, "edited": bool(branch.edited)}
        digest = compute_task_digest(replayed.stored.row, replayed.stored.environment)
        folder.append(build_line(rollout, key, digest=digest, branch=origin), failed=is_failed)


def _strip(item: Item) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key not in IGNORED_FIELDS and value is not None}


def _excerpt(item: Item | None) -> str:
    if item is None:
        return "nothing"
    text = jsonl.dump_portable_json(item.get("output", item.get("content"))).decode()
    return text if len(text) <= 200 else f"{text[:200]}…"  # noqa: PLR2004  # a line of an error message
