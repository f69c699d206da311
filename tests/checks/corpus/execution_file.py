"""Fails semantic.code_execution: `verify` writes the code block of the reply to a file and runs it."""

import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

from gymsdk import Message, Task, Verdict, hookimpl


class Sum(Task):
    total: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, two = rng.randrange(100, 999), rng.randrange(100, 999)
        yield Sum.ask(f"Write a program in a ```python block that prints {one} + {two}.", total=one + two)


@hookimpl
def solve(task: Sum):
    return Message(content=f"```python\nprint({task.total})\n```")


@hookimpl
def verify(task: Sum, transcript):
    block = re.search(r"```python\n(.*?)```", transcript.reply, re.DOTALL)
    if block is None:
        return Verdict(reward=0.0)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(block[1])
        command = [sys.executable, program]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return Verdict(reward=float(ran.stdout.strip() == str(task.total)))
