"""Kinds: the four kinds of servers, their implementations, and how NeMo Gym names them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from gymsdk.configuration.nodes import Node

Kind: TypeAlias = Literal["resources_servers", "responses_api_agents", "responses_api_models", "environment_servers"]

RESOURCES: Kind = "resources_servers"
AGENTS: Kind = "responses_api_agents"
MODELS: Kind = "responses_api_models"
ENVIRONMENTS: Kind = "environment_servers"
KINDS: tuple[Kind, ...] = (RESOURCES, AGENTS, MODELS, ENVIRONMENTS)

POLICY = "policy_model"
"""What the model server is called that answers for the policy."""

IMPLEMENTATIONS: dict[Kind, tuple[str, ...]] = {
    AGENTS: ("simple_agent", "gymnasium_agent"),
    MODELS: ("gymsdk_model", "openai_model", "vllm_model"),
    ENVIRONMENTS: ("single_agent_turn", "single_agent_turn_legacy", "legacy_agent"),
}
"""What can be written under a kind; under `resources_servers` it is an environment's name."""

THEIRS = {
    "example_single_tool_call": "tool_call",
    "example_multi_step": "multineedle",
    "library_judge_math": "math",
    "math_with_judge": "math",
}
"""NeMo Gym's resources servers that an environment of ours is, where the names differ."""

REFUSED = {
    "local_vllm_model": "start vLLM with `gymsdk serve --launch-vllm`, or write vllm_model with its base_url",
    "local_vllm_model_proxy": "write vllm_model with the base_url of the vLLM server it would share",
    "azure_openai_model": "write openai_model with the openai_base_url of the deployment, ending in /openai/v1",
    "inference_provider": "write vllm_model with the provider's base_url, api_key and model",
    "litellm_model": "write vllm_model with the base_url of a LiteLLM proxy",
    "genrm_model": "write vllm_model with the judge's base_url, and name it in the settings of the environment",
}
"""NeMo Gym's model servers that there are no counterparts of, and what to write instead."""

SPELLED: dict[str, dict[str, str]] = {
    "openai_model": {
        "model_name": "openai_model",
        "model": "openai_model",
        "base_url": "openai_base_url",
        "api_key": "openai_api_key",
    },
}
"""What a model server's keys are called too; with every other `model_name` means `model`."""


def named(name: str) -> str:
    """Give the environment that NeMo Gym's resources server *name* is."""
    return THEIRS.get(name, name)


def kind_of(implementation: str) -> Kind | None:
    """Give the kind that *implementation* is of, `None` where its name does not tell."""
    if implementation in REFUSED:
        return MODELS
    return next((kind for kind, known in IMPLEMENTATIONS.items() if implementation in known), None)


def spelled(root: Node) -> Node:
    """Give *root* with the keys of its model servers called as one name each, so that later ones win over earlier."""
    for name, block in root.children.items():
        models = block.get(MODELS)
        if models is None or not models.is_mapping:
            continue
        renamed = {each: _renamed(each, node) for each, node in models.children.items()}
        root = root.with_key(name, block.with_key(MODELS, Node({**renamed}, models.place)))
    return root


def _renamed(implementation: str, node: Node) -> Node:
    if not node.is_mapping:
        return node
    names = SPELLED.get(implementation, {"model_name": "model"})
    return Node({names.get(key, key): each for key, each in node.children.items()}, node.place)
