from __future__ import annotations

from typing import Any

import pytest
from config.conftest import Write
from omegaconf import OmegaConf

from gymsdk.config.model import ModelServerConfig
from gymsdk.config.read import load_config_mapping
from gymsdk.errors import BadConfig

FILES = [
    "responses_api_models/vllm_model/configs/vllm_model_for_training.yaml",
    "resources_servers/math_with_judge/configs/math_with_judge.yaml",
]
NEMO_RL: dict[str, Any] = {
    "config_paths": FILES,
    "policy_model_name": "Qwen/Qwen3-4B",
    "policy_api_key": "dummy_key",
    "policy_base_url": ["http://10.0.0.1:3000/v1", "http://10.0.0.2:3000/v1"],
    "default_host": "10.0.0.1",
    "port_range_low": 5000,
    "port_range_high": 5999,
    "global_aiohttp_connector_limit_per_host": 16384,
    "global_aiohttp_connector_limit": 65536,
    "ray_head_node_address": "10.0.0.1:6379",
    "head_server": {"host": "0.0.0.0", "port": 5123},
}


def get_model_config(block: object) -> ModelServerConfig:
    assert isinstance(block, ModelServerConfig)
    return block


def test_nemo_rls_settings_reach_every_replica_with_token_ids() -> None:
    deployment = load_config_mapping(NEMO_RL)
    part = get_model_config(deployment.get_servers("responses_api_models")[0].kind_settings)
    assert part.name == "vllm/Qwen/Qwen3-4B"
    assert part.options["base_url"] == ("http://10.0.0.1:3000/v1", "http://10.0.0.2:3000/v1")
    assert part.options["api_key"].get_secret_value() == "dummy_key"
    assert part.options["tokens"] is True
    assert (deployment.port, deployment.host) == (5123, "10.0.0.1")
    assert (deployment.port_range.low, deployment.port_range.high) == (5000, 5999)
    limit = "global_aiohttp_connector_limit"
    assert tuple(deployment.ignored) == (limit, f"{limit}_per_host")
    assert deployment.ray_address == "10.0.0.1:6379"


def test_references_in_an_omegaconf_configuration_are_resolved() -> None:
    mapping = OmegaConf.create(NEMO_RL | {"node": "10.0.0.9", "default_host": "${node}"})
    assert load_config_mapping(mapping).host == "10.0.0.9"


def test_verls_settings_extend_the_block_of_the_built_in_file() -> None:
    vllm = {"uses_reasoning_parser": False, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    mapping = {
        "config_paths": [f"/gym/{file}" for file in FILES],
        "policy_model_name": "m",
        "policy_api_key": "EMPTY",
        "policy_base_url": ["http://10.0.0.1:3000/v1"],
        "policy_model": {"responses_api_models": {"vllm_model": vllm}},
        "uv_venv_dir": "/gym",
        "skip_venv_if_present": True,
        "head_server": {"host": "0.0.0.0", "port": 5124},
    }
    deployment = load_config_mapping(mapping)
    part = get_model_config(deployment.get_servers("responses_api_models")[0].kind_settings)
    assert part.options["extra_body"] == {"chat_template_kwargs": {"enable_thinking": False}}
    assert tuple(deployment.ignored) == ("skip_venv_if_present", "uv_venv_dir")


def test_a_mapping_overrides_the_environment(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_BASE_URL", "http://elsewhere/v1")
    monkeypatch.setenv("GYMSDK_API_KEY", "anothers-key")
    write("env.yaml", "policy_model_name: other\ndefault_host: 127.0.0.2\n")
    deployment = load_config_mapping(NEMO_RL)
    assert deployment.policy.base_urls[0] == "http://10.0.0.1:3000/v1"
    assert deployment.policy.model_name == "Qwen/Qwen3-4B"
    assert deployment.host == "10.0.0.1"


def test_a_named_env_file_replaces_the_one_of_the_folder(write: Write) -> None:
    write("env.yaml", "log_level: debug\n")
    env_file = write("nemo_gym_env.yaml", "log_level: error\n")
    assert load_config_mapping({}, env_file=env_file).logs.level == "error"
    assert load_config_mapping({}, env_file=env_file.with_name("absent.yaml")).logs.level == "warning"


def test_an_error_in_a_mapping_is_reported() -> None:
    with pytest.raises(BadConfig, match=r"^handed over: there is no setting 'polcy_model_name'; did you mean 'policy"):
        load_config_mapping({"polcy_model_name": "m"})
