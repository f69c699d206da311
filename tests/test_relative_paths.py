"""Relative paths of a command, and the working folders of threads."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

import pytest

from gymsdk.concurrency import ThreadIterator, ThreadPool
from gymsdk.errors import UsageError
from gymsdk.rollouts.folder import RunFolder
from gymsdk.working_folder import get_working_folder, keep_working_folder, resolve_path, shorten_path


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working folder of the test."""
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.chdir(there)
    return there


def test_paths_of_a_command_start_where_it_was_started(folder: Path, tmp_path: Path) -> None:
    with keep_working_folder():
        os.chdir(tmp_path)
        assert resolve_path(Path("run")) == folder / "run"
        assert resolve_path(tmp_path) == tmp_path
        assert shorten_path(folder / "run") == Path("run")
        assert shorten_path(tmp_path) == tmp_path
        assert RunFolder(Path("run")).rollouts == folder / "run" / "rollouts.jsonl"
    assert resolve_path(Path("run")) == tmp_path / "run"


def test_a_removed_working_folder_is_an_error_only_where_a_path_needs_it(folder: Path, tmp_path: Path) -> None:
    folder.rmdir()
    assert resolve_path(tmp_path) == tmp_path
    assert shorten_path(tmp_path) == tmp_path
    with pytest.raises(UsageError, match="the working folder has been removed"):
        get_working_folder()
    with keep_working_folder(), pytest.raises(UsageError, match="the working folder has been removed"):
        resolve_path(Path("run"))


def change_folder(folder: Path) -> tuple[str, str]:
    """Return the working folder at the start and after a change that other threads have time to see."""
    before = str(Path.cwd())
    os.chdir(folder)
    time.sleep(0.05)
    return before, str(Path.cwd())


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a thread a working folder of its own")
async def test_a_call_in_a_thread_changes_the_working_folder_for_itself_only(folder: Path, tmp_path: Path) -> None:
    pool = ThreadPool()
    other = tmp_path / "other"
    other.mkdir()
    # The second call gets the thread of the first one.
    assert [await pool.run(change_folder, other) for _ in range(2)] == [(str(folder), str(other))] * 2
    assert Path.cwd() == folder
    os.chdir(tmp_path)
    assert await pool.run(lambda: str(Path.cwd())) == str(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives a thread a working folder of its own")
def test_an_iterator_in_a_thread_keeps_its_working_folder_to_itself(folder: Path, tmp_path: Path) -> None:
    def list_folders() -> list[str]:
        with contextlib.chdir(tmp_path):
            return [str(Path.cwd())]

    assert next(ThreadIterator(list_folders)) == str(tmp_path)
    assert Path.cwd() == folder
