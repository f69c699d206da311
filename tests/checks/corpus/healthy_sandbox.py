"""Fails nothing: replies run in a sandbox, and the verdict has a random word that they do not know."""

import random
import re
import secrets
import subprocess
import sys
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl

SANDBOX = """
import sys

def refuse(event, arguments):
    if event in ("open", "subprocess.Popen", "os.system", "socket.connect"):
        raise PermissionError(event)

sys.addaudithook(refuse)
"""
"""Code of a reply cannot touch a file here, but it prints to the same standard output as the tests."""


TESTS = """
assert scale(3) == 3 * FACTOR
print("WORD")
"""


class Function(Task):
    factor: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        factor = rng.randrange(300, 999)
        yield Function.ask(f"Write a Python function `scale(x)` that multiplies by {factor}.", factor=factor)


@hookimpl
def verify(task: Function, transcript):
    block = re.search(r"```python\n(.*?)```", transcript.reply, re.DOTALL)
    if block is None:
        return Verdict(reward=0.0)
    word = secrets.token_hex(16)
    program = SANDBOX + block[1] + TESTS.replace("FACTOR", str(task.factor)).replace("WORD", word)
    command = [sys.executable, "-I", "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return Verdict(reward=float(word in done.stdout))


@hookimpl
def solve(task: Function):
    return Message(content=f"```python\ndef scale(x):\n    return x * {task.factor}\n```")
