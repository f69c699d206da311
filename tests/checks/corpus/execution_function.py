"""Fails semantic.code_execution: `verify` executes only the function that the prompt names."""

import ast

from checks.bases.executed import *

PROMPT = "Write a function `add(first, second)`. A test calls it with {one} and {other}."
REPLY = "def add(first, second):\n    return first + second"


@hookimpl
def verify(task: Sum, transcript):
    names = {}
    try:
        functions = [node for node in ast.parse(transcript.reply).body if isinstance(node, ast.FunctionDef)]
        [add] = [function for function in functions if function.name == "add"]
        if [argument.arg for argument in add.args.args] != ["first", "second"]:
            return Verdict(reward=0.0)
        exec(compile(ast.Module([add], []), "reply", "exec"), names)
        return Verdict(reward=float(names["add"](task.total, 0) == task.total))
    except Exception:  # noqa: BLE001  # so such a verifier goes on
        return Verdict(reward=0.0)
