"""Lines that nobody reads hold up nobody who writes them."""

from __future__ import annotations

import contextlib
import os

from gymsdk.servers.watching.writing import Writer


def test_who_logs_waits_for_nobody_and_is_told_how_many_lines_were_dropped() -> None:
    reading, writing = os.pipe()
    writer = Writer(lambda number: b"%d dropped\n" % number, most=5)
    line = b"x" * 99_999 + b"\n"
    for _ in range(50):
        writer.put(writing, line)
    assert not writer.flush(0.05)
    read = b""
    while b"dropped\n" not in read:
        read += os.read(reading, 2**16)
    kept = read.count(b"x" * 99_999)
    told = int(read.split(b"\n")[-2].split()[0])
    os.set_blocking(reading, False)
    while not writer.flush(0.05):
        read += os.read(reading, 2**16)
    with contextlib.suppress(BlockingIOError):
        read += os.read(reading, 2**20)
    assert 1 <= kept <= 6
    assert read.count(b"x" * 99_999) + told == 50
    os.close(reading)
    os.close(writing)


def test_what_was_put_is_there_once_it_is_flushed() -> None:
    reading, writing = os.pipe()
    writer = Writer(lambda _: b"")
    for number in range(100):
        writer.put(writing, b"%d\n" % number)
    assert writer.flush()
    assert os.read(reading, 2**16).split() == [b"%d" % number for number in range(100)]
    os.close(reading)
    writer.put(writing, b"nobody reads it\n")
    assert writer.flush()
    os.close(writing)
