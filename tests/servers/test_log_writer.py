"""Lines to a slow or ended reader do not block the code that logs."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gymsdk.config.model import LogConfig
from gymsdk.observability.logging import FLUSH_SECONDS, LogHandler, LogRelay


class SlowStream(io.StringIO):
    """A stream that blocks until its reader continues."""

    def __init__(self) -> None:
        super().__init__()
        self.reading = threading.Event()

    def write(self, text: str) -> int:
        self.reading.wait()
        return super().write(text)


def test_a_relay_does_not_wait_and_reports_dropped_lines() -> None:
    out = SlowStream()
    relay = LogRelay(out, max_lines=5)
    for number in range(50):
        relay.put(f"line {number}")
    assert not relay.wait_until_written(0.05)
    out.reading.set()
    assert relay.wait_until_written()
    lines = out.getvalue().splitlines()
    kept = [each for each in lines if each.startswith("line")]
    reports = [each for each in lines if each.endswith(" lines were dropped because they were not read in time)")]
    # The thread may have taken one line when the queue became full.
    assert kept == [f"line {number}" for number in range(len(kept))]
    assert 5 <= len(kept) <= 6
    assert len(kept) + sum(int(each.strip("(").split()[0]) for each in reports) == 50
    relay.put("later")
    relay.close()
    assert out.getvalue().endswith("\nlater\n")


def test_closing_a_relay_ends_its_thread() -> None:
    before = threading.active_count()
    out = io.StringIO()
    relay = LogRelay(out)
    for number in range(100):
        relay.put(f"{number}")
    assert threading.active_count() == before + 1
    relay.close()
    assert threading.active_count() == before
    assert out.getvalue().split() == [str(number) for number in range(100)]


@pytest.mark.slow
def test_closing_a_relay_whose_reader_is_stuck_takes_a_bounded_time() -> None:
    out = SlowStream()
    relay = LogRelay(out)
    relay.put("stuck")
    started = time.monotonic()
    relay.close()
    assert time.monotonic() - started < FLUSH_SECONDS + 10
    assert out.getvalue() == ""
    out.reading.set()


def test_lines_whose_reader_is_gone_are_dropped_silently(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        relay = LogRelay(stream)
        relay.put("read")
        assert relay.wait_until_written()
        assert os.read(reading, 100) == b"read\n"
        os.close(reading)
        for _ in range(3):
            relay.put("x" * 100_000)
        relay.close()
    assert capsys.readouterr().err == ""


def read_all(reading: int) -> bytes:
    text = b""
    with contextlib.suppress(BlockingIOError):
        while more := os.read(reading, 2**16):
            text += more
    return text


def build_record(text: str) -> logging.LogRecord:
    return logging.LogRecord("gymsdk", logging.INFO, "", 0, text, None, None)


def test_logging_does_not_wait_and_reports_dropped_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setattr("gymsdk.observability.logging.STDERR", writing)
    handler = LogHandler(LogConfig(level="info"), max_lines=5)
    for _ in range(50):
        handler.handle(build_record("x" * 99_999))
    written, text = handler.wait_until_written(0.05), b""
    assert not written
    while not written:
        written = handler.wait_until_written(0.05)
        text += read_all(reading)
    lines = text.decode().splitlines()
    kept = sum(each.endswith("x") for each in lines)
    reports = [each.partition(" warning gymsdk rollout=- request=- ")[2] for each in lines if not each.endswith("x")]
    assert all(each.endswith(" lines were dropped because they could not be written in time") for each in reports)
    assert 5 <= kept < 50
    assert kept + sum(int(each.split()[0]) for each in reports) == 50
    os.close(reading)
    handler.handle(build_record("nobody reads it"))
    handler.close()
    os.close(writing)


FORKING = """
import logging, os, sys, warnings
from pathlib import Path
from gymsdk.config.model import LogConfig
from gymsdk.observability.logging import FLUSH_SECONDS, log_to

warnings.simplefilter("ignore", DeprecationWarning)
with log_to(LogConfig(level="info", directory=Path(sys.argv[1]))):
    logging.getLogger("gymsdk").info("parent")
    child = os.fork()
    logging.getLogger("gymsdk").info("child" if child == 0 else "again")
if child:
    sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.slow
def test_a_forked_process_logs_too(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], check=True, timeout=30)
    lines = (tmp_path / "gymsdk.log").read_text().splitlines()
    assert sorted(each.rsplit(maxsplit=1)[1] for each in lines) == ["again", "child", "parent"]
