"""Find every synonym of one term in a haystack, look up their values, extract them in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from gymsdk import Claims, Message, Rollout, Task, ToolCall, Transcript, hookimpl

from .figures import by_needles
from .task import Split, SynonymConfig, SynonymTask, generated
from .verdict import SynonymVerdict, judged
from .words import value

Synonym: TypeAlias = Annotated[str, Field(description="The synonym, written as in the list.")]
Values: TypeAlias = Annotated[
    list[int], Field(description="The values of the term's synonyms, in the order of their lines.")
]


async def get_synonym_value(synonym: Synonym) -> dict[str, int]:
    """Look up the value of one synonym."""
    return {"synonym_value": value(synonym)}


async def extract_synonym_values(synonym_values: Values) -> dict[str, bool]:  # noqa: ARG001  # `verify` reads the call
    """Hand in the values of all synonyms of the term that the user's message has to do with."""
    return {"success": True}


@hookimpl
def tools() -> list[Callable[..., Any]]:
    """Give the look-up and the extraction."""
    return [get_synonym_value, extract_synonym_values]


@hookimpl
def tasks(split: Split, seed: int, config: SynonymConfig) -> Iterable[Task]:
    """Give haystacks of the configured size."""
    return generated(split, seed, config)


@hookimpl
async def verify(task: SynonymTask, transcript: Transcript) -> SynonymVerdict:
    """Judge the last extraction."""
    return judged(task, transcript.calls("extract_synonym_values"))


@hookimpl
async def solve(task: SynonymTask, transcript: Transcript) -> Message | list[ToolCall]:
    """Look up each expected synonym in turn, extract the values, say so."""
    looked_up = [(call.parsed() or {}).get("synonym") for call in transcript.calls("get_synonym_value")]
    for synonym in task.expected_synonyms:
        if synonym not in looked_up:
            return [ToolCall(name="get_synonym_value", arguments={"synonym": synonym})]
    if not judged(task, transcript.calls("extract_synonym_values")).accuracy:
        arguments = {"synonym_values": task.expected_synonym_values}
        return [ToolCall(name="extract_synonym_values", arguments=arguments)]
    return Message(content="I have extracted the values of all synonyms, in the order of the list.")


@hookimpl
async def claims() -> Claims:
    """Claim that nothing but the right values in the right order pays."""
    return Claims(maximum=1.0, chance=0.0)


@hookimpl
def metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Give the mean reward by number of needles."""
    return by_needles(rollouts)
