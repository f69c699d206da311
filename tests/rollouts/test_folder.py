from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gymsdk.errors import BadOutput, GymsdkError
from gymsdk.rollouts import folder as torn
from gymsdk.rollouts.folder import RunFolder


def _line(task: int, repeat: int = 0, **fields: Any) -> dict[str, Any]:
    return {"_ng_task_index": task, "_ng_rollout_index": repeat, "reward": 1.0, **fields}


def _start(folder: RunFolder, **settings: Any) -> None:
    folder.start(settings=settings, about={"python": "3"}, inputs=[_line(0), _line(1)])


def test_a_folder_is_created_with_its_parents_and_removed_if_it_is_not_used(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a" / "b") as folder:
        _start(folder)
    assert (tmp_path / "a" / "b" / "run.json").exists()
    with pytest.raises(RuntimeError), RunFolder(tmp_path / "c" / "b"):
        raise RuntimeError
    assert not (tmp_path / "c").exists()


def test_a_file_at_the_path_is_reported(tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(BadOutput, match=r"out is a file; name a folder with --output$"), RunFolder(tmp_path / "out"):
        pass
    with pytest.raises(BadOutput, match="Not a directory; choose another"), RunFolder(tmp_path / "out" / "in"):
        pass


THREE_AT_ONCE = """
import os, sys, time
from pathlib import Path
from gymsdk.errors import BadOutput
from gymsdk.rollouts.folder import RunFolder

def enter(folder, start, tried):
    while time.monotonic() < start:
        pass
    try:
        with RunFolder(folder):
            os.write(tried, b"entered ")
            # The folder stays empty, and locked, until all three have tried.
            while os.fstat(tried).st_size < 3 * len("entered "):
                time.sleep(0.001)
            (folder / "run.json").touch()
    except BadOutput:
        os.write(tried, b"refused ")

for number in range(int(sys.argv[2])):
    base = Path(sys.argv[1], str(number))
    tried = os.open(f"{base}.tried", os.O_CREAT | os.O_APPEND | os.O_RDWR)
    start, children = time.monotonic() + 0.01, []
    for _ in range(3):
        children.append(os.fork())
        if not children[-1]:
            try:
                enter(base / "out", start, tried)
            finally:
                os._exit(0)
    for child in children:
        os.waitpid(child, 0)
    print(*sorted(os.pread(tried, 100, 0).decode().split()), (base / "out" / "run.json").exists())
"""
"""Three processes enter one new folder at the same moment, in many rounds; the script prints each result."""


@pytest.mark.slow
def test_only_one_of_three_concurrent_processes_enters_a_new_folder(tmp_path: Path) -> None:
    rounds = 30
    command = [sys.executable, "-c", THREE_AT_ONCE, str(tmp_path), str(rounds)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ended.stdout.splitlines() == ["entered refused refused True"] * rounds


def test_unreadable_rows_leave_an_existing_run_unchanged(tmp_path: Path) -> None:
    def broken() -> Any:
        yield _line(0)
        raise RuntimeError

    with RunFolder(tmp_path) as folder:
        _start(folder, model="one")
        folder.append(_line(0))
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(RuntimeError):
            folder.start(settings={"model": "other"}, about={}, inputs=broken())
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_new_run_removes_only_the_files_of_the_previous_one(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with RunFolder(tmp_path) as folder:
        _start(folder, model="one")
        folder.append(_line(0))
        asyncio.run(folder.write_metrics([b"[]"]))
        _start(folder, model="other")
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "inputs.jsonl", "run.json"}
    assert folder.read_settings() == {"model": "other"}


def test_a_folder_reports_the_progress_of_its_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        _start(folder)
        folder.append(_line(0, 0, reward=0.25))
        folder.append(_line(0, 1, reward=0.5))
        folder.append(_line(1, 0), failed=True)
        progress = folder.read_progress()
    assert progress.done == {(0, 0), (0, 1), (1, 0)}
    assert (progress.scored, progress.earned, progress.failed) == (2, 0.75, 1)


@pytest.mark.parametrize("kept_bytes", [1, 10, 30])
def test_a_partial_last_line_is_removed_on_resume(tmp_path: Path, kept_bytes: int) -> None:
    with RunFolder(tmp_path) as folder:
        _start(folder)
        for name, failed in (("rollouts", False), ("failures", True)):
            folder.append(_line(0, _ng_failure_terminal=True), failed=failed)
            with (tmp_path / f"{name}.jsonl").open("ab") as file:
                file.write(json.dumps(_line(1)).encode()[:kept_bytes])
        folder.resume({})
        assert len(list(folder.read_rollouts())) == len(list(folder.read_failures())) == 1
        folder.append(_line(1))
        assert [stored.task for stored in folder.read_rollouts()] == [0, 1]


@pytest.mark.parametrize("whole", [b"", b"one\n", b"one\ntwo\n", b"x" * 200_000 + b"\n"])
def test_dropping_a_partial_line_keeps_whole_lines_of_any_length(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "file"
    for part in (b"", b"torn", b"t" * 150_000):
        path.write_bytes(whole + part)
        torn.drop_partial_line(path)
        assert path.read_bytes() == whole


def test_a_resume_removes_failures_that_a_retry_may_fix(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        _start(folder)
        folder.append(_line(0, _ng_failure_terminal=True), failed=True)
        folder.append(_line(1, _ng_failure_terminal=False), failed=True)
        folder.resume({"command": "again"})
        assert folder.read_progress().done == {(0, 0)}
    assert json.loads(folder.run.read_bytes())["resumed"] == [{"command": "again"}]


def test_an_invalid_run_json_is_reported(tmp_path: Path) -> None:
    for text in ("", "{}", "[]", '{"settings": 3}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(BadOutput, match="unreadable; start over with --overwrite"):
            RunFolder(tmp_path).read_settings()


def test_values_that_json_cannot_express_are_replaced(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        _start(folder)
        folder.append(_line(0, big=2**70, text="half \ud800 a pair", nothing=float("nan")))
        folder.append(_line(1))
        replaced, plain = (stored.line for stored in folder.read_rollouts())
    assert (replaced["big"], replaced["text"], replaced["nothing"]) == (2.0**70, "half ? a pair", None)
    assert plain == _line(1)


def test_a_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "rollouts.jsonl").symlink_to("/dev/full")
    with (
        RunFolder(tmp_path) as folder,
        pytest.raises(GymsdkError, match=r"No space left on device; correct the cause, then"),
    ):
        folder.append(_line(0))
