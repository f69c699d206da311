"""Fails semantic.no_solution_leakage: the error message of a tool contains the expected arguments."""

from checks.bases.submit import *


async def submit(total: Annotated[int, Field(description="The sum.")], task: Sum) -> str:
    """Hand in the sum."""
    return "right" if total == task.total else f"no, that should have been {task.total}"


@hookimpl
def verify(task: Sum, transcript):
    handed_in = [(call.parsed() or {}).get("total") for call in transcript.calls("submit")]
    return Verdict(reward=float(handed_in[:1] == [task.total]))
