"""Check that no coroutine of the environment blocks the event loop."""

from __future__ import annotations

import logging
import re
from collections import Counter

from gymsdk.checks.performance import Performance, build_scripts
from gymsdk.checks.report import Check, Finding
from gymsdk.checks.subject import Subject
from gymsdk.deadlines import MAX_LOOP_BLOCK_SECONDS

MAX_TASKS = 3
"""How many tasks are played, by the oracle and at random."""

PLAY_ROUNDS = 2
"""How often each script is played. On a busy machine, any code can exceed the limit once."""


class _BlockedLoopHandler(logging.Handler):
    """Counts the warnings about code that blocked the event loop."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.by: Counter[str] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        if "held the event loop" in str(record.msg):
            self.by[re.sub(r" of environment '.*'", "", str(record.args[0] if record.args else ""))] += 1  # type: ignore[index]  # our own message has arguments


async def _check_blocking(subject: Subject) -> list[Finding]:
    handler, log = _BlockedLoopHandler(), logging.getLogger("gymsdk")
    async with subject.enter_environment() as environment:
        played_scripts = await build_scripts(
            subject, environment, tasks=await subject.count_affordable(environment, MAX_TASKS, each=6)
        )
        log.addHandler(handler)
        try:
            for script in played_scripts * PLAY_ROUNDS:
                await Performance(script, environment).play_all()
        finally:
            log.removeHandler(handler)
    episodes = len(played_scripts) * PLAY_ROUNDS
    return [
        Finding(
            seen=f"{name} held the event loop for more than {MAX_LOOP_BLOCK_SECONDS * 1e3:.0f} ms"
            f" {times} times in {episodes} episodes"
        )
        for name, times in handler.by.items()
        if times >= max(3, episodes // 4)
    ]


CHECKS = (
    Check(
        id="runtime.blocking",
        asks="no `async def` hook or tool holds the event loop",
        why="while it blocks, every other episode of the process waits, and deadlines pass",
        mend="write it as a plain `def`, which runs in a thread, or put CPU-heavy work into an `@offload` function",
        run=_check_blocking,
    ),
)
