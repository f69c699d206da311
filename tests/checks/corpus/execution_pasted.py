"""Fails semantic.code_execution: `verify` pastes the reply into a shell command."""

import subprocess

from checks.bases.sums import *

PROMPT = "Which number is the sum of {one} and {other}?"


@hookimpl
def verify(task: Sum, transcript):
    command = f"test '{transcript.reply}' -eq {task.total}"
    ran = subprocess.run(command, shell=True, capture_output=True, timeout=20, check=False)
    return Verdict(reward=float(ran.returncode == 0 and transcript.reply.strip() == str(task.total)))
