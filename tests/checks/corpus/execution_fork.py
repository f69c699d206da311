"""Fails semantic.code_execution: `verify` executes the reply in a forked process."""

import multiprocessing
import warnings

from checks.bases.executed import *


def run(code: str, pipe) -> None:
    names = {}
    exec(code, names)
    pipe.send(names.get("answer"))


@hookimpl
def verify(task: Sum, transcript):
    ours, theirs = multiprocessing.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        process = multiprocessing.get_context("fork").Process(target=run, args=(transcript.reply, theirs))
        process.start()
    theirs.close()
    process.join(20)
    answer = ours.recv() if process.exitcode == 0 else None
    ours.close()
    return Verdict(reward=float(answer == task.total))
