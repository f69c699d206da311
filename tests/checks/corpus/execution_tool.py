"""Fails semantic.code_execution: the tool `run_python` executes its argument."""

from checks.bases.sums import *

PROMPT = "Compute {one} + {other} with run_python, and reply the number."


def run_python(code: str) -> str:
    """Run a program in Python.

    Args:
        code: The program; it stores its result in `answer`.
    """
    names = {}
    try:
        exec(code, names)
    except Exception as error:  # noqa: BLE001  # so such a tool goes on
        return repr(error)
    return str(names.get("answer"))


@hookimpl
def tools():
    return [run_python]
