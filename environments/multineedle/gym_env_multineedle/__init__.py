"""multineedle: find all synonyms of one term in a long list and extract their values in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from gymsdk import Claims, Message, Rollout, Task, ToolCall, Transcript, hookimpl

from .grading import SynonymVerdict, compute_metrics, grade_extraction
from .haystack import Split, SynonymConfig, SynonymTask, compute_value, generate_tasks

Synonym: TypeAlias = Annotated[str, Field(description="The synonym, written as in the list.")]
Values: TypeAlias = Annotated[
    list[int], Field(description="The values of the term's synonyms, in the order of their lines.")
]


async def get_synonym_value(synonym: Synonym) -> dict[str, int]:
    """Look up the value of one synonym."""
    return {"synonym_value": compute_value(synonym)}


async def extract_synonym_values(synonym_values: Values) -> dict[str, bool]:  # noqa: ARG001  # `verify` reads the call
    """Hand in the values of all synonyms of the term that the user's message has to do with."""
    return {"success": True}


@hookimpl
def tools() -> list[Callable[..., Any]]:
    """Return the two tools: `get_synonym_value` and `extract_synonym_values`."""
    return [get_synonym_value, extract_synonym_values]


@hookimpl
def tasks(split: Split, seed: int, config: SynonymConfig) -> Iterable[Task]:
    """Generate the tasks of a split.

    Args:
        split: `train` (endless), `validation` or `example`.
        seed: The same seed, split and settings generate the same tasks.
        config: The size of each list and the number of synonyms to extract.

    Returns:
        The tasks, generated lazily.
    """
    return generate_tasks(split, seed, config)


@hookimpl
async def verify(task: SynonymTask, transcript: Transcript) -> SynonymVerdict:
    """Grade the last call of `extract_synonym_values`.

    Args:
        task: The row with the expected synonym values.
        transcript: The transcript of the episode.

    Returns:
        The verdict: reward 1.0 if the last call lists exactly the expected values in order, else 0.0.
    """
    return grade_extraction(task, transcript.calls("extract_synonym_values"))


@hookimpl
async def solve(task: SynonymTask, transcript: Transcript) -> Message | list[ToolCall]:
    """Return the next turn of a perfect policy.

    The policy looks up each expected synonym in turn, extracts the values, and ends with a reply.

    Args:
        task: The row with the expected synonyms.
        transcript: The transcript so far.

    Returns:
        One tool call, or the final reply.
    """
    looked_up = [(call.parsed() or {}).get("synonym") for call in transcript.calls("get_synonym_value")]
    for synonym in task.expected_synonyms:
        if synonym not in looked_up:
            return [ToolCall(name="get_synonym_value", arguments={"synonym": synonym})]
    if not grade_extraction(task, transcript.calls("extract_synonym_values")).accuracy:
        arguments = {"synonym_values": task.expected_synonym_values}
        return [ToolCall(name="extract_synonym_values", arguments=arguments)]
    return Message(content="I have extracted the values of all synonyms, in the order of the list.")


@hookimpl
async def claims() -> Claims:
    """Claim a maximum reward of 1.0 and a reward of 0.0 for guessing."""
    return Claims(maximum=1.0, chance=0.0)


@hookimpl
def metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return `needles=<n>/mean/reward` for each number of needles in *rollouts*."""
    return compute_metrics(rollouts)
