"""Fails semantic.no_solution_leakage: a wrong reply is answered with the right one, and the next reply counts."""

from checks.bases.sums import *


@hookimpl
def step(task: Sum, action, transcript):
    tried = sum(item.get("role") == "assistant" for item in transcript.items)
    if action.text == str(task.total) or tried > 2:
        return Step(done=True)
    return Step(messages=[f"No, it is not {action.text}; think of {task.total}."])
