from __future__ import annotations

from typing import Any

import pytest
from configuration.conftest import Write
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


def player(given: object) -> ModelServerConfig:
    assert isinstance(given, ModelServerConfig)
    return given


def test_nemo_rl_s_settings_reach_every_replica_with_token_ids() -> None:
    found = load_config_mapping(NEMO_RL)
    part = player(found.get_servers("responses_api_models")[0].part)
    assert part.name == "vllm/Qwen/Qwen3-4B"
    assert part.options["base_url"] == ("http://10.0.0.1:3000/v1", "http://10.0.0.2:3000/v1")
    assert part.options["api_key"].get_secret_value() == "dummy_key"
    assert part.options["tokens"] is True
    assert (found.head.port, found.ports.low, found.ports.high, found.default_host) == (5123, 5000, 5999, "10.0.0.1")
    assert tuple(found.ignored) == (
        "global_aiohttp_connector_limit",
        "global_aiohttp_connector_limit_per_host",
        "ray_head_node_address",
    )


def test_an_omegaconf_configuration_is_read_with_its_references() -> None:
    given = OmegaConf.create(NEMO_RL | {"node": "10.0.0.9", "default_host": "${node}"})
    assert load_config_mapping(given).default_host == "10.0.0.9"


def test_verl_s_settings_lay_a_block_over_the_built_in_file() -> None:
    vllm = {"uses_reasoning_parser": False, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    given = {
        "config_paths": [f"/gym/{each}" for each in FILES],
        "policy_model_name": "m",
        "policy_api_key": "EMPTY",
        "policy_base_url": ["http://10.0.0.1:3000/v1"],
        "policy_model": {"responses_api_models": {"vllm_model": vllm}},
        "uv_venv_dir": "/gym",
        "skip_venv_if_present": True,
        "head_server": {"host": "0.0.0.0", "port": 5124},
    }
    found = load_config_mapping(given)
    part = player(found.get_servers("responses_api_models")[0].part)
    assert part.options["extra_body"] == {"chat_template_kwargs": {"enable_thinking": False}}
    assert tuple(found.ignored) == ("skip_venv_if_present", "uv_venv_dir")


def test_a_mapping_overrides_the_environment(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYMSDK_BASE_URL", "http://elsewhere/v1")
    monkeypatch.setenv("GYMSDK_API_KEY", "anothers-key")
    write("env.yaml", "policy_model_name: other\ndefault_host: 127.0.0.2\n")
    found = load_config_mapping(NEMO_RL)
    assert found.policy.base_urls[0] == "http://10.0.0.1:3000/v1"
    assert found.policy.model_name == "Qwen/Qwen3-4B"
    assert found.default_host == "10.0.0.1"


def test_a_named_env_file_is_read_instead_of_the_folder_s(write: Write) -> None:
    write("env.yaml", "log_level: debug\n")
    named = write("nemo_gym_env.yaml", "log_level: error\n")
    assert load_config_mapping({}, env_file=named).logs.level == "error"
    assert load_config_mapping({}, env_file=named.with_name("absent.yaml")).logs.level == "warning"


def test_an_error_in_a_mapping_says_so() -> None:
    with pytest.raises(BadConfig, match=r"^handed over: there is no setting 'polcy_model_name'; did you mean 'policy"):
        load_config_mapping({"polcy_model_name": "m"})
