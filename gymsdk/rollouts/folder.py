"""A run's folder: what was asked, the rows as sent, every finished rollout, safe against a kill at any moment."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import IO, Any, Self

from pydantic import ConfigDict

from gymsdk import jsonl
from gymsdk.errors import BadOutput, GymsdkError
from gymsdk.metrics import ROLLOUT_INDEX, TASK_INDEX
from gymsdk.plugins.calls import STEPS_COMPONENT
from gymsdk.rollouts.jobs import Key
from gymsdk.types import Failure, Rollout, Row, Timing, Usage, Verdict

TRAJECTORY = "ng_trajectory"
"""The key of NeMo Gym's trajectory on a rollout's line."""

WRITTEN = frozenset({"response", "reward", "reward_components", TRAJECTORY, "gymsdk"})
"""What a line says of how its row was played: from a row that was played before it is out of date."""

ATTEMPT_INDEX = "_ng_attempt_index"
"""The stamp NeMo Gym numbers the tries of a failed rollout with."""

AGAIN = frozenset({"judge_failed", "host_broke", "threads_exhausted"})
"""Failures beyond the model's own that lie with the run's set-up or its host, and may be gone by a resume."""

LOST = frozenset({"worker_killed", "worker_timeout", "worker_start"})
"""Failures that in `verify` may lie with the answer: playing on until it is a lighter one would choose the rewards."""


class StoredVerdict(Verdict):
    """A verdict read back from its line: its own fields as plain JSON."""

    model_config = ConfigDict(frozen=True, extra="allow")


def unplayed(row: Row, *, keep: Container[str] = ()) -> Row:
    """Give *row* without what an earlier play wrote on it, its verdict's own fields too, but for those to *keep*."""
    ours = row.get("gymsdk")
    names = ours.get("verdict") if isinstance(ours, dict) else None
    stale = WRITTEN.union(map(str, names if isinstance(names, list) else ()), {ATTEMPT_INDEX})
    return {
        key: value for key, value in row.items() if key in keep or not (key in stale or key.startswith("_ng_failure_"))
    }


def scored(rollout: Rollout, key: Key, *, attempts: int = 1) -> Row:
    """Give the line of a scored rollout.

    The verdict's fields stand flat beside the row's; `reward_components` is there where there are components. Raises
    `ValueError` if the reward is not finite: JSON has no such number, and the line would have no reward.
    """
    if rollout.reward is None or not math.isfinite(rollout.reward):
        raise ValueError(f"the reward of a scored rollout must be a finite number, not {rollout.reward}")
    verdict: dict[str, Any] = {}
    if rollout.verdict is not None:
        verdict = rollout.verdict.model_dump(mode="json", exclude={"reward", "components"})
    components = {"reward_components": rollout.components} if rollout.components else {}
    ours = _ours(rollout, attempts) | {"verdict": list(verdict)}
    return {**_played(rollout), **verdict, "reward": rollout.reward, **components, **_stamps(key), "gymsdk": ours}


def failed(rollout: Rollout, key: Key, *, attempts: int) -> Row:
    """Give the line of a rollout without a reward: what failed, where, and what there is of the response.

    It is terminal where a resume is to leave it as it is.
    """
    failure = rollout.failure or Failure(stage="", kind="unknown", message="")
    told = {
        "_ng_failure_class": failure.kind,
        "_ng_failure_stage": failure.stage,
        "_ng_failure_message": failure.message,
        "_ng_failure_terminal": _terminal(failure),
        ATTEMPT_INDEX: attempts - 1,
    }
    ours = _ours(rollout, attempts) | {"retryable": failure.retryable}
    return {**_played(rollout), **told, **_stamps(key), "gymsdk": ours}


def _terminal(failure: Failure) -> bool:
    """Give whether neither another try nor a run set up rightly can help, or ought to."""
    if failure.stage == "verify" and failure.kind in LOST:
        return True
    return not (failure.retryable or failure.stage == "model" or failure.kind in AGAIN)


def key_of(line: Row) -> Key:
    """Give a line's place in its run."""
    return line[TASK_INDEX], line[ROLLOUT_INDEX]


def read(line: Row) -> Rollout:
    """Give the scored rollout written on *line*, its verdict's own fields as plain JSON."""
    ours = line["gymsdk"]
    fields = {name: line[name] for name in ours["verdict"] if name in line}
    components = line.get("reward_components", {})
    judged = {name: value for name, value in components.items() if name != STEPS_COMPONENT}
    params = line["responses_create_params"]
    return Rollout(
        id=ours["id"],
        rollout_id=ours.get("rollout_id", ""),
        environment=ours["environment"],
        row={key: value for key, value in line.items() if key not in WRITTEN},
        seed=ours["seed"],
        repeat=line[ROLLOUT_INDEX],
        outcome="scored",
        ended=ours["ended"],
        opening=params["input"],
        tools=params.get("tools", []),
        response=line["response"],
        reward=line["reward"],
        components=components,
        verdict=StoredVerdict(
            **{"reward": line["reward"] - components.get(STEPS_COMPONENT, 0.0), "components": judged, **fields}
        ),
        turns=ours["turns"],
        usage={role: Usage(**used) for role, used in ours["usage"].items()},
        timing=Timing(**ours["timing"]),
    )


def _played(rollout: Rollout) -> Row:
    row = unplayed(rollout.row)
    own = row.get("responses_create_params", {})
    params = {**own, **rollout.sampling, "input": rollout.opening or own.get("input", [])}
    params |= {"tools": rollout.tools} if rollout.tools else {}
    return {**row, "responses_create_params": params, "response": rollout.response}


def _stamps(key: Key) -> Row:
    return {TASK_INDEX: key[0], ROLLOUT_INDEX: key[1]}


def _ours(rollout: Rollout, attempts: int) -> Row:
    kept = {"id", "environment", "seed", "outcome", "ended", "turns", "usage", "timing"}
    kept |= {"rollout_id"} if rollout.rollout_id else set()
    return rollout.model_dump(mode="json", include=kept) | {"attempts": attempts}


def cut(path: Path) -> None:
    """Cut a torn last line off the file at *path*, if there is one."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        whole = _last_newline(file, size)
        if whole != size:
            file.truncate(whole)


def _last_newline(file: IO[bytes], size: int, block: int = 65536) -> int:
    """Give the size up to and with the last newline, 0 where there is none."""
    while size:
        start = max(0, size - block)
        file.seek(start)
        at = file.read(size - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        size = start
    return 0


FILES = ("rollouts.jsonl", "failures.jsonl", "inputs.jsonl", "metrics.json", "run.json")
"""What a run writes."""

DRAWN = ("profile.json", "profile.png")
"""What a profile adds."""

CREATE_TRIES = 100
"""How many times a process creates its folder before it gives up: others may remove it while it is empty."""


@dataclass(slots=True)
class Standing:
    """How far a run is: the places that are settled, what the scored ones earned, how many failed for good."""

    done: set[Key] = field(default_factory=set)
    scored: int = 0
    earned: float = 0.0
    failed: int = 0


class RunFolder:
    """The files of one run under *path*; held by one process at a time, as `with folder:`.

    A rollout's line is handed to the kernel whole before `keep` returns, so a killed process loses none it counted.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rollouts, self.failures, self.inputs, self.metrics, self.run = (path / name for name in FILES)
        self._discarded = path / "run.old"
        self._open: dict[Path, FileIO] = {}
        self._locked: int | None = None
        self._created: list[Path] = []

    def __enter__(self) -> Self:
        try:
            self._lock()
        except FileExistsError:
            raise BadOutput(f"{self.path} is a file; name a folder with --output") from None
        except OSError as error:
            raise BadOutput(f"cannot write to {self.path}: {error.strerror}; choose another --output") from None
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        """Create the folder if it is missing, and lock it; raises `BadOutput` if another run holds the lock."""
        missing = [each for each in (self.path, *self.path.parents) if not each.exists()]
        try:
            self._locked = _create_and_lock(self.path)
            _check_writable(self.path)
        except BaseException:
            # The folder itself is another run's unless this process locked it.
            self._created = missing if self._locked is not None else missing[1:]
            self.close()
            raise
        self._created = missing

    def close(self) -> None:
        """Close the files, remove the folders that this object created if they are still empty, and unlock."""
        for file in self._open.values():
            file.close()
        self._open.clear()
        if self._locked is not None:
            # Before the lock is released: a process that locks it next sees that it is gone, and creates it again.
            if self.path in self._created:
                _remove_if_empty(self.path)
            os.close(self._locked)
            self._locked = None
        for parent in self._created:
            if parent != self.path:
                _lock_and_remove_if_empty(parent)
        self._created.clear()

    @property
    def ours(self) -> bool:
        """Whether a run was asked for here, or was being removed when its remover was killed."""
        return self.run.exists() or self._discarded.exists()

    @property
    def begun(self) -> bool:
        """Whether there is a run to go on with."""
        return self.run.exists() and (self.inputs.exists() or self.rollouts.exists())

    def strangers(self) -> list[str]:
        """Give the names a run would overwrite that no run has written here."""
        return [] if self.ours else [name for name in FILES if (self.path / name).exists()]

    def clear(self) -> None:
        """Remove a run's files, and nothing else."""
        if self.run.exists():
            # Until the last of them is gone, this name says that they may go.
            self.run.replace(self._discarded)
        for name in (*FILES, *DRAWN):
            (self.path / name).unlink(missing_ok=True)
        self._discarded.unlink(missing_ok=True)

    def begin(self, *, settings: Row, about: Row, inputs: Iterable[Row]) -> None:
        """Write down what is asked and the rows to send; whatever run was here goes once all rows are read."""
        fresh = _part(self.inputs)
        try:
            with _writing(self.inputs), fresh.open("wb") as file:
                file.writelines(map(jsonl.dump_row, inputs))
            self.clear()
            # Before the rows: without them the run has not begun, and this file says whose the folder is.
            self._write(self.run, {**about, "settings": settings, "resumed": []})
            fresh.replace(self.inputs)
        finally:
            fresh.unlink(missing_ok=True)

    def settings(self) -> Row:
        """Give the settings the folder's run was begun with."""
        begun: Row = self._about()["settings"]
        return begun

    def resume(self, now: Row, *, repeats: int = 1) -> None:
        """Prepare to continue the run.

        Adds *now* to run.json, cuts torn last lines and removes the failures that a retry can help. Rows that an older
        version wrote once per task are written again, once per repeat.
        """
        written = self._about()
        self._write(self.run, {**written, "resumed": [*written["resumed"], now]})
        self._number_repeats(repeats)
        for path in (self.rollouts, self.failures):
            cut(path)
        fresh = _part(self.failures)
        kept = (line for line in self.read_failures() if line.get("_ng_failure_terminal"))
        with _writing(self.failures), fresh.open("wb") as file:
            file.writelines(map(jsonl.dump_row, kept))
        fresh.replace(self.failures)

    def _number_repeats(self, repeats: int) -> None:
        first = next(self.read_inputs(), None)
        if first is None or ROLLOUT_INDEX in first:
            return
        fresh = _part(self.inputs)
        numbered = ({**row, ROLLOUT_INDEX: repeat} for row in self.read_inputs() for repeat in range(repeats))
        with _writing(self.inputs), fresh.open("wb") as file:
            file.writelines(map(jsonl.dump_row, numbered))
        fresh.replace(self.inputs)

    def keep(self, line: Row, *, failed: bool = False) -> None:
        """Write one finished rollout's line."""
        path = self.failures if failed else self.rollouts
        left = memoryview(jsonl.dump_row(line))
        with _writing(path):
            file = self._file(path)
            while left:
                left = left[file.write(left) :]

    def read_inputs(self) -> Iterator[Row]:
        """Yield the rows as sent."""
        return (row for _, row in jsonl.read_rows(self.inputs))

    def read_rollouts(self) -> Iterator[Row]:
        """Yield the lines of scored rollouts."""
        return _lines(self.rollouts)

    def read_failures(self) -> Iterator[Row]:
        """Yield the lines of rollouts without a reward."""
        return _lines(self.failures)

    def standing(self) -> Standing:
        """Give how far the run is."""
        found = Standing()
        for line in self.read_rollouts():
            found.done.add(key_of(line))
            found.scored += 1
            found.earned += line["reward"]
        for line in self.read_failures():
            found.done.add(key_of(line))
            found.failed += 1
        return found

    def conclude(self, metrics: Any) -> None:
        """Write the run's figures; every file of a run is there from now on."""
        for path in (self.rollouts, self.failures):
            path.touch()
        self._write(self.metrics, metrics)

    def _about(self) -> Row:
        try:
            written = jsonl.parse_json(self.run.read_bytes())
            return {**written, "settings": dict(written["settings"]), "resumed": list(written["resumed"])}
        except (OSError, ValueError, KeyError, TypeError):
            raise BadOutput(f"{self.run} is missing or unreadable; start over with --overwrite") from None

    def _file(self, path: Path) -> FileIO:
        if path not in self._open:
            self._open[path] = path.open("ab", buffering=0)
        return self._open[path]

    def _write(self, path: Path, value: Any) -> None:
        fresh = _part(path)
        with _writing(path):
            fresh.write_bytes(jsonl.dump_document(value))
            fresh.replace(path)


def _create_and_lock(path: Path) -> int:
    """Create the folder at *path* if it is missing and give a descriptor that holds its lock.

    Another process may remove the folder that it created between any two of these steps. What counts is therefore a
    lock on the folder that is at *path* afterwards.
    """
    for _ in range(CREATE_TRIES):
        try:
            path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise BadOutput(f"another run is writing to {path}; wait for it or choose another --output") from None
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise BadOutput(f"cannot write to {path}: it is removed as soon as it is created; choose another --output")


def _check_writable(path: Path) -> None:
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadOutput(f"cannot write to {path}: permission denied; choose another --output")


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove_if_empty(folder: Path) -> None:
    # The kernel refuses to remove a folder with something inside.
    with suppress(OSError):
        folder.rmdir()


def _lock_and_remove_if_empty(folder: Path) -> None:
    """Remove *folder* unless something is inside, or a run that writes to it holds its lock."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        # It was not created in the end, or another process has removed it.
        return
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_if_empty(folder)
    os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GymsdkError(f"cannot write {path}: {error.strerror}; mend that, then go on with --resume") from error


def _part(path: Path) -> Path:
    return path.with_suffix(".part")


def _lines(path: Path) -> Iterator[Row]:
    return (row for _, row in jsonl.read_rows(path)) if path.exists() else iter(())
