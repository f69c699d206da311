"""Keys, names and paths are the text in the file, whatever type YAML 1.1 gives this text."""

from __future__ import annotations

from pathlib import Path

import pytest
from config.conftest import Write
from omegaconf import OmegaConf

from gymsdk.config.read import load_config
from gymsdk.models.options import load_policy_settings

TEXTS = [
    "0711",
    "00123456",
    "0x1F",
    "0o17",
    "0b11",
    "1_000",
    "12:30:45",
    "1e3",
    "1e10",
    "1.10",
    ".inf",
    "+1",
    "no",
    "On",
    "True",
    "2024-01-01",
]

POLICY = "mine: {0}\npolicy_base_url: http://h/${{mine}}/v1\npolicy_api_key: {0}\npolicy_model_name: ${{mine}}\n"

SERVERS = """
theirs: {0}
{0}:
  responses_api_models:
    vllm_model: {{base_url: http://other/v1, api_key: "${{theirs}}", model: {0}, default_headers: {{X-Key: {0}}}}}
math:
  resources_servers:
    math:
      datasets: [{{name: {0}, type: example, jsonl_fpath: {0}}}]
agent:
  responses_api_agents:
    simple_agent:
      resources_server: {{type: resources_servers, name: math}}
      model_server: {{type: responses_api_models, name: {0}}}
"""


@pytest.mark.parametrize("text", TEXTS)
def test_the_policy_of_a_found_file_has_the_texts_in_the_file(write: Write, text: str) -> None:
    write("env.yaml", POLICY.format(text))
    settings = load_policy_settings()
    assert settings.policy_api_key is not None
    assert settings.policy_api_key.get_secret_value() == text
    assert (settings.policy_model_name, settings.policy_base_url) == (text, f"http://h/{text}/v1")


@pytest.mark.parametrize("text", TEXTS)
def test_the_servers_of_a_file_have_the_texts_in_the_file(write: Write, folder: Path, text: str) -> None:
    write("a.yaml", POLICY.format(text) + SERVERS.format(text))
    deployment = load_config(["a.yaml"])
    model, math, agent = deployment.servers
    assert deployment.policy.api_key is not None
    assert deployment.policy.api_key.get_secret_value() == text
    assert (deployment.policy.model_name, deployment.policy.base_urls) == (text, (f"http://h/{text}/v1",))
    options = getattr(model.kind_settings, "options", {})
    assert (model.name, getattr(model.kind_settings, "name", "")) == (text, f"vllm/{text}")
    assert (options["api_key"].get_secret_value(), options["headers"]["X-Key"].get_secret_value()) == (text, text)
    assert (math.datasets[0].name, math.datasets[0].path) == (text, folder / text)
    assert agent.refers["model_server"] == text


@pytest.mark.parametrize("text", TEXTS)
def test_overrides_have_their_texts(text: str) -> None:
    words = ["policy_base_url=http://h/v1", f"policy_api_key={text}", f"policy_model_name={text}", f"token_file={text}"]
    deployment = load_config([], words)
    assert deployment.policy.api_key is not None
    assert deployment.policy.api_key.get_secret_value() == text
    assert (deployment.policy.model_name, deployment.token_file) == (text, Path.cwd() / text)


def test_null_sets_nothing(write: Write) -> None:
    write("env.yaml", "policy_api_key: ~\npolicy_model_name: null\npolicy_base_url:\n")
    assert load_policy_settings().model_dump(exclude_none=True) == {}


def test_settings_of_other_types_keep_the_types_of_yaml(write: Write) -> None:
    write("a.yaml", "port: 0x1F90\nhead_server: {host: localhost, port: '${port}'}\ninsecure: yes\n")
    deployment = load_config(["a.yaml"])
    assert (deployment.head_address, deployment.insecure) == (("localhost", 8080), True)


COMPUTED = """
size: 0x8
index: 0x1
names: [first, second]
half: "${test.halve:${size}}"
policy_base_url: http://h/v1
policy_model_name: ${names.${index}}
policy_api_key: k-${half}
mine:
  responses_api_models:
    vllm_model: {base_url: "http://h/${test.halve:${size}}/v1", api_key: k, model: m, extra_body: {size: "${half}"}}
"""


def test_references_inside_references_and_resolvers_read_numbers(write: Write) -> None:
    # OmegaConf 2.4 renamed the function.
    register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver
    register("test.halve", lambda number: number // 2)
    try:
        deployment = load_config([write("c.yaml", COMPUTED)])
    finally:
        OmegaConf.clear_resolver("test.halve")
    assert (deployment.policy.model_name, deployment.policy.base_urls) == ("second", ("http://h/v1",))
    assert deployment.policy.api_key is not None
    assert deployment.policy.api_key.get_secret_value() == "k-4"
    options = getattr(deployment.servers[0].kind_settings, "options", {})
    assert (options["base_url"], options["extra_body"]) == (("http://h/4/v1",), {"size": 4})
