"""Fails semantic.code_execution: `verify` runs the reply as a shell command."""

import subprocess

from checks.bases.executed import *

PROMPT, REPLY = "Write a shell command that prints the sum of {one} and {other}.", "echo {total}"


@hookimpl
def verify(task: Sum, transcript):
    ran = subprocess.run(transcript.reply, shell=True, capture_output=True, text=True, timeout=20, check=False)
    return Verdict(reward=float(ran.stdout.strip() == str(task.total)))
