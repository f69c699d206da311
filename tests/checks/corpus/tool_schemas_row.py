"""Fails runtime.tool_schemas: the tool of its rows has a type that JSON Schema does not define."""

from checks.bases.sums import *

CALCULATOR = {
    "type": "function",
    "name": "reckon",
    "description": "Reckon.",
    "parameters": {"type": "object", "properties": {"sum": {"type": "text"}}, "required": ["sum"]},
}


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(10**6), rng.randrange(10**6)
        prompt = [{"role": "user", "content": f"What is {one} + {other}?"}]
        yield Sum(responses_create_params={"input": prompt, "tools": [CALCULATOR]}, total=one + other)
