"""What workers share: each id has one owner, and a pause reaches a worker that starts later."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.connection import Connection

import pytest

from gymsdk.cluster import shared_memory
from gymsdk.cluster.shared_memory import ENTRIES_PER_BUCKET, SharedMemory, SharedPause, create_shared_file


@pytest.fixture
def file():
    descriptor = create_shared_file()
    yield descriptor
    os.close(descriptor)


def test_the_first_worker_that_claims_an_id_owns_it(file):
    one, other = SharedMemory(file), SharedMemory(file)
    assert [one.claim("a", 1, 60), other.claim("a", 2, 60)] == [1, 1]
    assert [other.claim("b", 2, 60), one.claim("b", 1, 60)] == [2, 2]


def test_a_released_or_expired_or_taken_id_has_a_new_owner(file):
    memory = SharedMemory(file)
    memory.claim("released", 1, 60)
    memory.release("released", 2)
    assert memory.claim("released", 2, 60) == 1
    memory.release("released", 1)
    assert memory.claim("released", 2, 60) == 2
    memory.claim("expired", 1, -1)
    assert memory.claim("expired", 2, 60) == 2
    memory.claim("taken", 1, 60)
    # An id is taken only from the owner that has ended.
    assert [memory.claim("taken", worker, 60, take_from=1) for worker in (2, 3)] == [2, 2]
    assert memory.claim("taken", 1, 60) == 2


def test_a_repeat_renews_a_claim_and_never_shortens_it(file):
    memory = SharedMemory(file)
    for seconds in (0.2, 60, 0.1):
        assert memory.claim("a", 1, seconds) == 1
    time.sleep(0.3)
    assert memory.claim("a", 2, 60) == 1


def test_a_full_bucket_forgets_the_id_that_expires_first(file, monkeypatch):
    monkeypatch.setattr(shared_memory, "BUCKETS", 1)
    memory = SharedMemory(file)
    ids = [f"id-{number}" for number in range(ENTRIES_PER_BUCKET)]
    for number, claimed in enumerate(ids):
        memory.claim(claimed, 1, 60 + number)
    # The first two are renewed, so the third expires first.
    for claimed in ids[:2]:
        memory.claim(claimed, 1, 100)
    memory.claim("new", 1, 90)
    others = ["new", *ids[:2], *ids[3:]]
    assert {memory.claim(claimed, 2, 1000) for claimed in others} == {1}
    assert memory.claim(ids[2], 2, 1000) == 2


@pytest.mark.slow
def test_200_000_ids_fit(file):
    memory = SharedMemory(file)
    ids = [f"id-{number}" for number in range(200_000)]
    for claimed in ids:
        memory.claim(claimed, 1, 60)
    assert [memory.claim(claimed, 2, 60) for claimed in ids[::100]].count(1) >= 1999


def test_the_workers_of_one_deployment_share_a_secret(file):
    other = create_shared_file()
    secrets = [SharedMemory(claimed).secret for claimed in (file, file, other)]
    os.close(other)
    assert secrets[0] == secrets[1] != secrets[2]
    assert len(set(secrets[0])) > 4


def _claim_and_wait(file: int, channel: Connection) -> None:
    memory = SharedMemory(file)
    for number in range(2000):
        memory.claim(f"id-{number}", os.getpid(), 60)
    channel.send(os.getpid())
    channel.recv()


def _take_all(file: int, ended: int, channel: Connection) -> None:
    memory = SharedMemory(file)
    channel.send(memory.is_running(ended))
    channel.recv()
    channel.send([memory.claim(f"id-{number}", os.getpid(), 60, take_from=ended) for number in range(2000)])


def test_one_of_the_processes_that_take_an_id_from_a_killed_owner_gets_it(file):
    context, memory = multiprocessing.get_context("fork"), SharedMemory(file)
    ours, theirs = context.Pipe()
    owner = context.Process(target=_claim_and_wait, args=(file, theirs))
    owner.start()
    ended = ours.recv()
    assert (memory.is_running(ended), memory.is_running(os.getpid())) == (True, True)
    owner.kill()
    owner.join()
    assert memory.is_running(ended) is False

    pipes = [context.Pipe() for _ in range(2)]
    takers = [context.Process(target=_take_all, args=(file, ended, pipe)) for _, pipe in pipes]
    for taker in takers:
        taker.start()
    assert [pipe.recv() for pipe, _ in pipes] == [False, False]
    for pipe, _ in pipes:
        pipe.send("begin")
    owners = [pipe.recv() for pipe, _ in pipes]
    for taker in takers:
        taker.join()
    assert owners[0] == owners[1]
    assert set(owners[0]) <= {taker.pid for taker in takers}


def test_a_pause_is_shared_and_ends_by_itself(file):
    one, other = (SharedPause(SharedMemory(file), 3) for _ in range(2))
    assert other.get_remaining_seconds() < 0
    one.begin(60)
    assert 0 < other.get_remaining_seconds() <= 60
    assert SharedPause(SharedMemory(file), 2).get_remaining_seconds() < 0
    other.end()
    assert one.get_remaining_seconds() < 0
    one.begin(0.001)
    time.sleep(0.01)
    assert other.get_remaining_seconds() < 0
