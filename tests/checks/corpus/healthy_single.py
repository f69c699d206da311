"""Fails nothing: there is one task."""

from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class One(Task):
    """The one."""

    word: str


@hookimpl
def tasks(split: Literal["test"]):
    yield One.ask("Name the capital of Burkina Faso.", word="Ouagadougou")


@hookimpl
def verify(task: One, transcript):
    return Verdict(reward=float(transcript.reply.strip().lower() == task.word.lower()))


@hookimpl
def solve(task: One):
    return Message(content=task.word)
