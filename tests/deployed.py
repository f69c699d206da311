"""A deployment as a test sees it: the command line as processes of its own, and what their head says."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gymsdk.http import client

Key = tuple[str, int, int]

STARTING, ENDING = 60.0, 30.0


@dataclass
class Deployed:
    """One `gymsdk serve`: its process, and the line that it printed once it was ready."""

    process: asyncio.subprocess.Process
    told: dict[str, Any]

    @property
    def head(self) -> str:
        return str(self.told["head"])

    def url(self, name: str) -> str:
        return str(self.told["servers"][name]["url"])

    def children(self) -> dict[str, int]:
        """The processes of its servers, by the name of the server."""
        guards = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [pid for guard in guards for pid in Path(f"/proc/{guard}/task/{guard}/children").read_text().split()]
        words = {int(pid): Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in found}
        return {each[each.index("--only") + 1]: pid for pid, each in words.items() if "--only" in each}

    async def ended(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), ENDING)


async def started(*words: object, within: Sequence[str] = (), **more: Any) -> asyncio.subprocess.Process:
    command = [*within, sys.executable, "-m", "gymsdk", *map(str, words)]
    return await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, **more)


@asynccontextmanager
async def serving(*words: object, within: Sequence[str] = ()) -> AsyncIterator[Deployed]:
    """Servers that are ready; whatever became of them, they are killed when the test is over.

    *within* are the words before the command that have it run elsewhere.
    """
    process = await started("serve", *words, "--json", within=within)
    pids = {process.pid}
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), STARTING)
        found = Deployed(process, json.loads(line))
        pids |= set(found.children().values())
        yield found
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.communicate(), ENDING)
        except TimeoutError:
            process.kill()
            await process.communicate()
            raise
        await client.aclose()


async def command(*words: object, within: Sequence[str] = ()) -> tuple[int, str]:
    """The exit code of a command, and all that it said."""
    process = await asyncio.create_subprocess_exec(
        *[*within, sys.executable, "-m", "gymsdk", *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    said, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def nodes(head: str) -> dict[str, Any]:
    """What the head says of all."""
    answer: dict[str, Any] = (await client.get(f"{head}/nodes", retry=client.Retry(times=3))).json()
    return answer


async def named(head: str, name: str) -> list[dict[str, Any]]:
    """The instances of a server that answer."""
    return [
        each
        for each in (await nodes(head))["instances"]
        if each["name"] == name and each["status"] in {None, "success"}
    ]


async def until(true: Callable[[], Any], seconds: float = 30.0) -> None:
    """Wait until something is *true*."""
    async with asyncio.timeout(seconds):
        while not (await found if asyncio.iscoroutine(found := true()) else found):  # noqa: ASYNC110  # of anything
            await asyncio.sleep(0.05)


@dataclass
class Run:
    """A run of rollouts by a head, its folder *out*: begun, waited for, gone on with until nothing is left."""

    head: str
    names: tuple[str, ...]
    out: Path
    tasks: int
    repeats: int
    concurrency: int = 8
    within: Sequence[str] = ()

    async def begin(self, *more: object) -> asyncio.subprocess.Process:
        words = ("--split", "validation", "--limit", self.tasks, "-k", self.repeats, "--concurrency", self.concurrency)
        return await started(
            "rollout",
            *self.names,
            "--head",
            self.head,
            *words,
            "--output",
            self.out,
            *more,
            within=self.within,
        )

    async def end(self, process: asyncio.subprocess.Process) -> None:
        """Wait for it; what is left is all to be had by a resume."""
        await asyncio.wait_for(process.communicate(), 120)
        for _ in range(3):
            if not self.failures() and self.count() == self.all:
                return
            assert all(kind["retryable"] for kind in self.failures())
            await asyncio.wait_for((await self.begin("--resume")).communicate(), 120)
        assert (self.failures(), self.count()) == ([], self.all)

    @property
    def all(self) -> int:
        return self.tasks * self.repeats * len(self.names)

    def count(self) -> int:
        try:
            return (self.out / "rollouts.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    async def reached(self, count: int) -> None:
        await until(lambda: self.count() >= count, 60)

    def failures(self) -> list[dict[str, Any]]:
        lines = map(json.loads, (self.out / "failures.jsonl").read_bytes().splitlines())
        return [{"retryable": each["gymsdk"]["retryable"], "kind": each["_ng_failure_class"]} for each in lines]

    def content(self) -> dict[Key, Any]:
        """What the rollouts came to; one that counts twice is an error."""
        found: dict[Key, Any] = {}
        for line in map(json.loads, (self.out / "rollouts.jsonl").read_bytes().splitlines()):
            key = line["agent_ref"]["name"], line["_ng_task_index"], line["_ng_rollout_index"]
            assert key not in found
            said = [each.get("content") or each.get("name") for each in line["response"]["output"]]
            found[key] = line["reward"], json.dumps(said)
        return found
