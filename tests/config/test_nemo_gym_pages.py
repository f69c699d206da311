from __future__ import annotations

import pytest
from config.conftest import Write, list_settings

from gymsdk.config.model import ModelServerConfig, ResourcesServerConfig
from gymsdk.config.read import load_config
from gymsdk.errors import BadConfig

COORDINATOR = """\
head_server:
  host: "192.168.1.100"  # Coordinator's IP
  port: 11000

example_resources:
  resources_servers:
    example_single_tool_call:
      entrypoint: app.py
      host: "192.168.1.100"
      port: 8080
"""
WORKER = """\
head_server:
  host: "192.168.1.100"  # Points to coordinator
  port: 11000

policy_model:
  responses_api_models:
    openai_model:
      entrypoint: app.py
      host: "192.168.1.101"  # This worker's IP
      port: 8000
"""
ENV = "policy_api_key: sk-your-openai-key\n"
QUICK = (
    "+config_paths=[resources_servers/example_single_tool_call/configs/example_single_tool_call.yaml,"
    "responses_api_models/openai_model/configs/openai_model.yaml]"
)
VLLM = (
    "+config_paths=[resources_servers/multineedle/configs/multineedle.yaml,"
    "responses_api_models/vllm_model/configs/vllm_model.yaml]"
)


def test_the_coordinator_serves_its_resources_at_its_own_address(write: Write) -> None:
    write("coordinator-config.yaml", COORDINATOR)
    deployment = load_config([], ["+config_paths=[coordinator-config.yaml]"])
    [block] = deployment.servers
    assert (deployment.head_host, deployment.port) == ("192.168.1.100", 11000)
    assert (block.name, block.kind) == ("example_resources", "resources_servers")
    assert (block.host, block.port) == ("192.168.1.100", 8080)
    assert block.kind_settings == ResourcesServerConfig(environment="tool_call")
    assert str(block.place) == "coordinator-config.yaml:7"


def test_the_worker_serves_the_policys_model_with_the_key_of_the_folder(write: Write) -> None:
    write("worker-config.yaml", WORKER)
    write("env.yaml", ENV + "policy_model_name: gpt-5\n")
    deployment = load_config([], ["+config_paths=[worker-config.yaml]"])
    [block] = deployment.servers
    assert isinstance(block.kind_settings, ModelServerConfig)
    assert (block.port, block.kind_settings.name) == (8000, "openai/gpt-5")
    assert block.kind_settings.options["api_key"].get_secret_value() == "sk-your-openai-key"
    assert "sk-your" not in repr(deployment)


def test_a_worker_without_a_model_reports_what_is_missing(write: Write) -> None:
    write("worker-config.yaml", WORKER)
    with pytest.raises(BadConfig, match=r"^worker-config.yaml:7: .* needs the model's name: .* policy_model_name"):
        load_config(["worker-config.yaml"])


def test_the_quick_start_needs_only_env_yaml(write: Write) -> None:
    write("env.yaml", ENV + "policy_base_url: https://api.openai.com/v1\npolicy_model_name: gpt-5\n")
    deployment = load_config([], [QUICK])
    name = "example_single_tool_call"
    assert [block.name for block in deployment.servers] == [name, f"{name}_simple_agent", "policy_model"]
    assert deployment.servers[1].refers == {"resources_server": name, "model_server": "policy_model"}
    assert isinstance(deployment.servers[2].kind_settings, ModelServerConfig)
    assert deployment.servers[2].kind_settings.name == "openai/gpt-5"


def test_the_file_of_an_agent_alone_gives_an_agent_without_references(write: Write) -> None:
    write("env.yaml", ENV)
    [block] = load_config([], ["+config_paths=[responses_api_agents/simple_agent/config.yaml]"]).servers
    assert (block.name, block.kind, dict(block.refers)) == ("simple_agent", "responses_api_agents", {})


def test_the_arguments_of_the_remote_server_set_host_and_head(write: Write) -> None:
    write("production_config.yaml", "math: {resources_servers: {math: {entrypoint: app.py, domain: math}}}\n")
    deployment = load_config(
        [], ["+config_paths=[production_config.yaml]", "+default_host=0.0.0.0", "+head_server.port=8000"]
    )
    assert (deployment.host, deployment.head_host, deployment.port) == ("0.0.0.0", "0.0.0.0", 8000)
    assert deployment.servers[0].domain == "math"


def test_a_vllm_server_can_be_set_without_its_kind_and_without_v1() -> None:
    deployment = load_config(
        [],
        [
            VLLM,
            "+policy_model.vllm_model.base_url=http://your-vllm-server:10240",
            "+policy_model.vllm_model.model_name=your-model-name",
        ],
    )
    part = deployment.get_servers("responses_api_models")[0].kind_settings
    assert isinstance(part, ModelServerConfig)
    assert (part.name, part.options["base_url"]) == ("vllm/your-model-name", ("http://your-vllm-server:10240/v1",))
    path = "policy_model.responses_api_models.vllm_model"
    assert list_settings(deployment)[f"{path}.base_url"] == ("http://your-vllm-server:10240/v1", "command line")
    assert list_settings(deployment)[f"{path}.model"] == ("your-model-name", "command line")


def test_a_ray_address_is_read(write: Write) -> None:
    write("config.yaml", 'ray_head_node_address: "ray://your-cluster-address:10001"\n')
    deployment = load_config([], ["+config_paths=[config.yaml]"])
    assert (deployment.ray_address, deployment.ignored_keys_note) == ("ray://your-cluster-address:10001", None)
