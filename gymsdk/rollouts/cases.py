"""Cases: stored rollouts as they are to be judged once more, with the rows they were played from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from gymsdk import responses, rows, values
from gymsdk.errors import BadRow
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.rollouts.folder import FILES
from gymsdk.rollouts.jobs import Job, route, seed_of
from gymsdk.rollouts.lines import unplayed
from gymsdk.told import is_ours
from gymsdk.transcript import Ended, Item
from gymsdk.types import Row, agent_reference

ROLLOUTS, FAILURES, INPUTS, _, RUN = FILES

MASK = "**********"
"""What stands in run.json for a secret."""


@dataclass(frozen=True, slots=True)
class Case:
    """The rollout on a *line*, the *number*-th of its file, of *environment*; the row as it was *sent*, where known."""

    number: int
    line: Row
    environment: str
    sent: Row | None = None

    @property
    def row(self) -> Row:
        """Give the row it was played from.

        Where only the line is known, its verdict's fields stay: one may stand where the row has one of that name.
        """
        if self.sent is not None:
            return self.sent
        return unplayed({key: each for key, each in self.line.items() if key != "gymsdk"})

    @property
    def task(self) -> int:
        """Which task of its run it is."""
        return _whole(self.line.get(TASK_INDEX)) or 0

    @property
    def repeat(self) -> int:
        """Which repeat of the task."""
        return _whole(self.line.get(ROLLOUT_INDEX)) or 0

    @property
    def seed(self) -> int:
        """The seed of its episode: what the line says, or else what a run without another seed would have taken."""
        told = _whole(self._ours.get("seed"))
        return seed_of(0, Job(self.environment, self.task, self.repeat, self.row)) if told is None else told

    @property
    def reward(self) -> float | None:
        """What it earned when it was played, `None` where nothing."""
        reward = self.line.get("reward")
        masked = self.line.get("mask_sample") is True and not is_ours(self.line)
        return reward if isinstance(reward, (int, float)) and not masked else None

    @property
    def response(self) -> Item:
        """The response to be judged; raises `BadRow` where there is none."""
        response = self.line.get("response")
        if not isinstance(response, dict) or not responses.is_response(response):
            raise BadRow("there is no response to judge")
        return response

    @property
    def opening(self) -> list[Item] | None:
        """What the policy was shown first, `None` where the line does not tell."""
        shown = self.line["responses_create_params"].get("input")
        return shown if self._ours and isinstance(shown, list) else None

    @property
    def ended(self) -> Ended:
        """How the episode ended, as far as the line tells."""
        told: tuple[Ended, ...] = get_args(Ended)
        known = next((word for word in told if word == self._ours.get("ended")), None)
        return known or ("tokens" if responses.is_incomplete(self.response) else "done")

    @property
    def _ours(self) -> Item:
        ours = self.line.get("gymsdk")
        return ours if isinstance(ours, dict) else {}


class Run:
    """Stored rollouts: the folder of a run, or a file of their lines.

    Args:
        path: The folder or the file.
        agent: The agent that played the rollouts whose lines name none.

    Raises:
        BadRow: there is no such file.
    """

    def __init__(self, path: Path, *, agent: str | None = None) -> None:
        self._agent = agent
        self.path = path / ROLLOUTS if path.is_dir() else path
        if not self.path.is_file():
            raise BadRow(f"{self.path}: there is no such file; name a run's folder, or a file of rollouts")
        home = self.path.parent
        ours = self.path.name in {ROLLOUTS, FAILURES} and (home / RUN).is_file() and (home / INPUTS).is_file()
        self._inputs = Inputs(home / INPUTS) if ours else None
        self._home = home if ours else None

    def cases(self) -> Iterator[Case]:
        """Yield the stored rollouts; raises `BadRow` at a line that is none."""
        for number, written in rows.read(self.path):
            line = self._addressed(written)
            name = environment_of(line)
            if name is None or not isinstance(line.get("responses_create_params"), dict):
                raise BadRow(
                    f"{self.path}:{number}: this is no rollout, which has `responses_create_params` and says by"
                    " `agent_ref.name` which agent played it; name the agent with --agent, or mend or remove the line"
                )
            yield Case(number, line, name, self._inputs.row(line.get(TASK_INDEX)) if self._inputs else None)

    def _addressed(self, line: Row) -> Row:
        if self._agent is None or environment_of(line) is not None:
            return line
        return {**line, "agent_ref": agent_reference(self._agent)}

    def names(self) -> list[str]:
        """Give the environments of the stored rollouts."""
        return list(dict.fromkeys(case.environment for case in self.cases()))

    def settings(self, environment: str) -> dict[str, Any]:
        """Give the settings *environment* was played with, but for secrets; none where the rollouts do not tell."""
        if self._home is None:
            return {}
        try:
            about = values.parsed((self._home / RUN).read_bytes())
            found: Mapping[str, Any] = about["settings"]["environments"][environment]["settings"]
        except (OSError, ValueError, KeyError, TypeError):
            return {}
        return {name: value for name, value in found.items() if value != MASK}

    def holds(self, path: Path) -> bool:
        """Whether *path* is a file of the stored run itself."""
        own = [self.path, *((self._home / name for name in FILES) if self._home else ())]
        return path.resolve() in {each.resolve() for each in own}


class Inputs:
    """The rows of a run as they were sent, each read when it is asked for: a million are never in memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._places: dict[int, int] = {}
        place = 0
        with path.open("rb") as file:
            for line in file:
                if line.strip():
                    self._places.setdefault(rows.parsed(line, where=str(path))[TASK_INDEX], place)
                place += len(line)

    def row(self, task: object) -> Row | None:
        """Give the row numbered *task*, `None` where there is none."""
        place = self._places.get(task) if isinstance(task, int) else None
        if place is None:
            return None
        with self._path.open("rb") as file:
            file.seek(place)
            row = rows.parsed(file.readline(), where=str(self._path))
        return {key: value for key, value in row.items() if key not in {TASK_INDEX, ROLLOUT_INDEX}}


def environment_of(line: Row) -> str | None:
    """Give the environment a line is of, `None` where it does not say."""
    ours = line.get("gymsdk")
    name = ours.get("environment") if isinstance(ours, dict) else None
    return name if isinstance(name, str) else route(line)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
