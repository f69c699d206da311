"""NeMo Gym's settings that change rewards and have no counterpart here: any value that has an effect is an error.

Other settings without a counterpart are ignored with a warning. Ignoring one of these would collect rewards that
NeMo Gym would not give for the same file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gymsdk.configuration.nodes import Node, Scalar, plain
from gymsdk.configuration.places import Problems, Trail, dotted


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A setting whose value must be *harmless*, the one without an effect; *advice* says what to do instead."""

    harmless: Scalar
    advice: str


_SKIP = Unsupported(harmless=False, advice="every rollout is verified here; leave it out")

TOP: Mapping[str, Unsupported] = {"skip_verification": _SKIP}
"""Settings at the top of a configuration."""

_AGENT = {"skip_verification": _SKIP}

SETTINGS: Mapping[str, Mapping[str, Unsupported]] = {
    "simple_agent": {
        **_AGENT,
        "execute_tools": Unsupported(
            harmless=True,
            advice="the agent always runs the tools that the model calls; leave it out, or end the episode with "
            "max_steps: 1",
        ),
    },
    "gymnasium_agent": _AGENT,
    "vllm_model": {
        "endpoint_file": Unsupported(
            harmless=None, advice="write the address that the file holds as base_url; several are a list"
        ),
        "use_completions_api": Unsupported(
            harmless=False,
            advice="the model is asked in Chat Completions or Responses; start vLLM with --chat-template for a model "
            "that has none, and leave it out",
        ),
        "continue_final_assistant_message": Unsupported(
            harmless=False, advice="the model always begins a new turn; leave it out, and end the prompt with a user's"
        ),
        "propagate_context_overflow_errors": Unsupported(
            harmless=False,
            advice="a prompt that is too long gives an incomplete response, which is scored; leave it out",
        ),
    },
}
"""Settings of each implementation."""


def without_unsupported(node: Node, trail: Trail, settings: Mapping[str, Unsupported], problems: Problems) -> Node:
    """Return *node* without *settings*, and report to *problems* those whose values have an effect."""
    for key, value in _effective(node, settings):
        name = dotted((*trail, key))
        problems.add(node.children[key].place, f"{name}: {value} is not supported; {settings[key].advice}")
    return node.without(*settings)


def _effective(node: Node, settings: Mapping[str, Unsupported]) -> Iterator[tuple[str, str]]:
    for key, setting in settings.items():
        value = plain(node.children[key]) if key in node.children else None
        # `${oc.env:NAME,false}` gives the text of a variable.
        if value not in (None, "", setting.harmless) and str(value).lower() != str(setting.harmless).lower():
            yield key, str(value).lower() if isinstance(value, bool) else "this value"
