"""Functions in Python that are tested in a sandbox. A case has the tests, and grades the process."""

import re
import subprocess
import sys

from checks.bases.sums import *

SANDBOX = """
import sys

def refuse(event, arguments):
    if event in ("open", "subprocess.Popen", "os.system", "socket.connect"):
        raise PermissionError(event)

sys.addaudithook(refuse)
"""
"""Code of a reply cannot touch a file here, but it prints to the same standard output as the tests."""

OPEN, CLOSE = "```python\n", "```"


class Function(Task):
    factor: int


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        factor = rng.randrange(300, 999)
        yield Function.ask(f"Write a Python function `scale(x)` that multiplies by {factor}.", factor=factor)


def run(task: Function, transcript: Transcript, tests: str) -> subprocess.CompletedProcess[str]:
    block = re.search(f"{OPEN}(.*?){CLOSE}", transcript.reply, re.DOTALL)
    program = SANDBOX + block[1] + tests.replace("FACTOR", str(task.factor)) if block else "1 / 0"
    command = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


@hookimpl
def verify(task: Function, transcript):
    return Verdict(reward=float(grade(run(task, transcript, TESTS))))


@hookimpl
def solve(task: Function):
    return Message(content=f"{OPEN}def scale(x):\n    return x * {task.factor}\n{CLOSE}")
