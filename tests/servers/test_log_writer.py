"""Lines whose reader is slow do not block the code that logs."""

from __future__ import annotations

import contextlib
import os

from gymsdk.observability.logging import LogWriter


def test_logging_does_not_wait_and_reports_dropped_lines() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(lambda number: b"%d dropped\n" % number, max_lines=5)
    line = b"x" * 99_999 + b"\n"
    for _ in range(50):
        writer.put(writing, line)
    assert not writer.flush(0.05)
    os.set_blocking(reading, False)
    read, flushed = b"", False
    while not flushed:
        flushed = writer.flush(0.05)
        with contextlib.suppress(BlockingIOError):
            while more := os.read(reading, 2**16):
                read += more
    lines = read.splitlines()
    kept = lines.count(line.strip())
    # The number of lines that the thread takes before the last one is written depends on the machine: at least five.
    assert 5 <= kept < 50
    assert kept + sum(int(each.split()[0]) for each in lines if each.endswith(b"dropped")) == 50
    os.close(reading)
    os.close(writing)


def test_a_written_line_is_there_after_a_flush() -> None:
    reading, writing = os.pipe()
    writer = LogWriter(lambda _: b"")
    for number in range(100):
        writer.put(writing, b"%d\n" % number)
    assert writer.flush()
    assert os.read(reading, 2**16).split() == [b"%d" % number for number in range(100)]
    os.close(reading)
    writer.put(writing, b"nobody reads it\n")
    assert writer.flush()
    os.close(writing)
