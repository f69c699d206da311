"""What workers share: each id has one owner, and a pause reaches a worker that starts later."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from gymsdk.servers import shared_memory
from gymsdk.servers.shared_memory import ENTRIES_PER_BUCKET, SharedMemory, SharedPause, create_shared_file


@pytest.fixture
def file() -> Iterator[int]:
    descriptor = create_shared_file()
    yield descriptor
    os.close(descriptor)


def test_the_first_worker_that_claims_an_id_owns_it(file: int) -> None:
    one, other = SharedMemory(file), SharedMemory(file)
    assert [one.claim("a", 1, 60), other.claim("a", 2, 60), other.claim("b", 2, 60), one.claim("b", 1, 60)] == [
        1,
        1,
        2,
        2,
    ]


def test_a_released_or_expired_or_taken_id_has_a_new_owner(file: int) -> None:
    memory = SharedMemory(file)
    memory.claim("released", 1, 60)
    memory.release("released", 2)
    assert memory.claim("released", 2, 60) == 1
    memory.release("released", 1)
    assert memory.claim("released", 2, 60) == 2
    memory.claim("expired", 1, -1)
    assert memory.claim("expired", 2, 60) == 2
    memory.claim("taken", 1, 60)
    assert [memory.claim("taken", 2, 60, take=True), memory.claim("taken", 1, 60)] == [2, 2]


def test_a_full_bucket_forgets_its_oldest_id(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "BUCKETS", 1)
    memory = SharedMemory(file)
    for number in range(ENTRIES_PER_BUCKET + 1):
        memory.claim(f"id-{number}", 1, 60 + number)
    owners = [memory.claim(f"id-{number}", 2, 1000) for number in range(ENTRIES_PER_BUCKET, -1, -1)]
    assert owners == [1] * ENTRIES_PER_BUCKET + [2]


def _claim_all(file: int, worker: int, owned: multiprocessing.Queue[tuple[int, list[int]]]) -> None:
    memory = SharedMemory(file)
    owned.put((worker, [memory.claim(f"id-{number}", worker, 60) for number in range(2000)]))


def test_processes_that_claim_the_same_ids_at_once_agree_on_their_owners(file: int) -> None:
    context = multiprocessing.get_context("fork")
    owned: multiprocessing.Queue[tuple[int, list[int]]] = context.Queue()
    workers = [context.Process(target=_claim_all, args=(file, worker, owned)) for worker in (1, 2)]
    for worker in workers:
        worker.start()
    owners = dict(owned.get(timeout=30) for _ in workers)
    for worker in workers:
        worker.join()
    assert owners[1] == owners[2]
    assert Counter(owners[1]).keys() <= {1, 2}


def test_a_pause_is_shared_and_ends_by_itself(file: int) -> None:
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
