"""Fails semantic.code_execution: the tool `run` executes its second argument if its first one names a shell."""

import asyncio
import random
from typing import Literal

from gymsdk import Message, Task, ToolCall, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, two = rng.randrange(100, 999), rng.randrange(100, 999)
        yield Sum.ask(f"Compute {one} + {two} with run, and reply the number.", total=one + two)


@hookimpl
def solve(task: Sum, transcript):
    if not transcript.calls():
        return [ToolCall(name="run", arguments={"shell": "sh", "command": f"echo {task.total}"})]
    return Message(content=str(task.total))


async def run(shell: str, command: str) -> str:
    """Run a command.

    Args:
        shell: The name of the shell: sh.
        command: The command.
    """
    if shell != "sh":
        return "unknown shell"
    process = await asyncio.create_subprocess_exec("sh", "-c", command, stdout=asyncio.subprocess.PIPE)
    return (await process.communicate())[0].decode(errors="replace")


@hookimpl
def tools():
    return [run]


@hookimpl
def verify(task: Sum, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.total)))
