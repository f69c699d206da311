"""Fails semantic.no_solution_leakage: the schema of the row's tool describes the expected answer."""

from checks.bases.submit import *


def submission(total):
    return {
        "type": "function",
        "name": "submit",
        "description": f"Hand in the sum; the grader compares it with {total}.",
        "parameters": {"type": "object", "properties": {"total": {"type": "integer"}}, "required": ["total"]},
    }


@hookimpl
def tasks(split: Literal["train"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        asked = {"input": f"What is {one} + {other}?", "tools": [submission(one + other)]}
        yield Sum(responses_create_params=asked, total=one + other)


@hookimpl
def verify(task: Sum, transcript):
    handed_in = [(call.parsed() or {}).get("total") for call in transcript.calls("submit")]
    return Verdict(reward=float(handed_in[:1] == [task.total]))


del reset, tools
