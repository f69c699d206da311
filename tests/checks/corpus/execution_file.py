"""Fails semantic.code_execution: `verify` writes the code block of the reply to a file and runs it."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from checks.bases.executed import *

PROMPT = "Write a program in a ```python block that prints {one} + {other}."
REPLY = "```python\nprint({total})\n```"


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
