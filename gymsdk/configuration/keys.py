"""Keys: what may stand in a configuration, and which of NeMo Gym's keys mean nothing here."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

POLICY = ("policy_base_url", "policy_api_key", "policy_model_name")

USED = frozenset(
    {
        *POLICY,
        "head_server",
        "default_host",
        "advertise_host",
        "use_absolute_ip",
        "token_file",
        "insecure",
        "tls_certificate",
        "tls_key",
        "port_range_low",
        "port_range_high",
        "disallowed_ports",
        "log_level",
        "model_call_capture_dir",
        "observability_enabled",
        "log_format",
        "log_dir",
        "nemo_gym_log_dir",
        "profile_dir",
        "profiling_enabled",
        "profiling_results_dirpath",
        "model_endpoint_readiness_timeout_seconds",
    }
)
"""Keys at the top that mean something here, ours and NeMo Gym's."""

IGNORED = frozenset(
    {
        "agent_name",
        "allow_openai_version_skew",
        "cache_dir",
        "component_name",
        "dry_run",
        "entrypoint",
        "environment_routing_mode",
        "environment_server_routes",
        "error_on_agent_without_environment_server",
        "error_on_almost_servers",
        "head_server_deps",
        "hf_token",
        "input_jsonl_fpath",
        "invalid_tool_call_patterns",
        "json",
        "limit",
        "num_repeats",
        "num_samples_in_parallel",
        "output_jsonl_fpath",
        "pad_dynamic_image_shapes",
        "pip_install_verbose",
        "python_version",
        "query",
        "ray_head_node_address",
        "resources_tool_transports",
        "responses_create_params",
        "results_dir",
        "skip_venv_if_present",
        "skip_verification_reward",
        "thinking_tags",
        "token_id_capture",
        "tokenizer_config",
        "upload_rollouts",
        "uv_cache_dir",
        "uv_pip_set_python",
        "uv_venv_dir",
        "verbose",
    }
)
"""NeMo Gym's and its trainers' keys at the top that mean nothing here."""

IGNORED_LIKE = ("global_aiohttp_*", "uvicorn_*", "wandb_*", "mlflow_*", "profiling_*")
"""The same, whole families of them."""

BLOCK = frozenset({"entrypoint", "host", "port", "advertise_host", "domain", "datasets"})
"""Keys of every server that mean something here."""

BLOCK_IGNORED = frozenset({"num_workers", "head_server_deps", "python_version", "description", "verified", "value"})
"""NeMo Gym's keys of every server that mean nothing here."""

OURS = frozenset(
    {
        "base_url",
        "api_key",
        "model",
        "api",
        "timeout",
        "retries",
        "max_answer",
        "thoughts",
        "pinned",
        "extra_body",
        "chat_template_kwargs",
        "headers",
        "tokens",
    }
)
"""Keys of `gymsdk_model`."""

BUDGET = frozenset({"turns", "max_steps", "max_turns", "tool_calls", "deadline"})

IMPLEMENTATION: dict[str, frozenset[str]] = {
    "gymsdk_model": OURS,
    "openai_model": frozenset(
        {
            "openai_base_url",
            "openai_api_key",
            "openai_model",
            "openai_default_headers",
            "drop_input_reasoning_items",
            "extra_body",
            "max_http_attempts",
            "timeout",
            "retries",
            "max_answer",
        }
    ),
    "vllm_model": frozenset(
        {
            "base_url",
            "api_key",
            "model",
            "return_token_id_information",
            "sampling_overrides",
            "extra_body",
            "chat_template_kwargs",
            "default_headers",
            "is_responses_native",
            "uses_reasoning_parser",
            "uses_interleaved_reasoning",
            "preserve_reasoning_in_assistant_content",
            "timeout",
            "retries",
            "max_answer",
        }
    ),
    "simple_agent": BUDGET,
    "gymnasium_agent": BUDGET,
    "single_agent_turn": frozenset({"default_episode_timeout_seconds"}),
    "single_agent_turn_legacy": frozenset({"default_episode_timeout_seconds"}),
    "legacy_agent": frozenset({"default_episode_timeout_seconds"}),
}
"""Keys of one implementation that mean something here; an environment's are its settings."""

_TURN_IGNORED = frozenset(
    {"max_concurrent_episodes", "queue_timeout_seconds", "cleanup_timeout_seconds", "resources_tool_transports"}
)
_AGENT_IGNORED = frozenset({"skip_verification_reward", "observability_enabled", "token_id_capture"})
_MATH_IGNORED = frozenset({"library_verifier_timeout_seconds", "library_verifier_max_concurrency"})

IMPLEMENTATION_IGNORED: dict[str, frozenset[str]] = {
    "openai_model": frozenset({"max_concurrent_requests"}),
    "vllm_model": frozenset(
        {
            "replace_developer_role_with_system",
            "request_prompt_and_generation_token_ids",
            "sequential_reasoning_allowed",
            "supply_prefix_token_ids",
            "audio_root",
            "render_chat_template",
            "tokenizer",
            # Without endpoint_file, which is refused, NeMo Gym does not use these either.
            "endpoint_stale_grace_s",
            "endpoint_connection_retries",
            "endpoint_check_interval_s",
        }
    ),
    "simple_agent": _AGENT_IGNORED,
    "gymnasium_agent": _AGENT_IGNORED,
    "single_agent_turn": _TURN_IGNORED,
    "single_agent_turn_legacy": _TURN_IGNORED,
    "legacy_agent": _TURN_IGNORED,
    "library_judge_math": _MATH_IGNORED,
    "math_with_judge": _MATH_IGNORED,
}
"""NeMo Gym's keys of one implementation that mean nothing here."""


SLIP = 0.8
"""How similar two keys are, out of 1, of which one is a misspelling of the other."""


def is_slip(key: str, known: Iterable[str]) -> bool:
    """Whether *key* is a misspelling of one of *known*; ignoring it would ignore what was meant."""
    return bool(get_close_matches(key, [*known], n=1, cutoff=SLIP))


def is_ignored(key: str) -> bool:
    """Whether *key* at the top is NeMo Gym's and means nothing here."""
    return key in IGNORED or any(fnmatchcase(key, pattern) for pattern in IGNORED_LIKE if key not in USED)


def used(implementation: str) -> frozenset[str]:
    """Return the keys under *implementation* that have an effect here, if it is not an environment."""
    return BLOCK | IMPLEMENTATION.get(implementation, frozenset())


def ignored(implementation: str) -> frozenset[str]:
    """Give the keys under *implementation* that mean nothing here."""
    return BLOCK_IGNORED | IMPLEMENTATION_IGNORED.get(implementation, frozenset())
