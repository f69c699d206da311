"""Fails semantic.code_execution: `verify` passes the reply to a new interpreter."""

import subprocess
import sys

from checks.bases.executed import *

PROMPT, REPLY = "Write a Python program that prints the sum of {one} and {other}.", "print({total})"


@hookimpl
def verify(task: Sum, transcript):
    command = [sys.executable, "-c", transcript.reply]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return Verdict(reward=float(ran.stdout.strip() == str(task.total)))
