from __future__ import annotations

from typing import Any

import pytest
from config.conftest import ReadErrors, Write, list_settings
from pydantic import SecretStr

from gymsdk import model
from gymsdk.config.model import AgentServerConfig, Deployment, ModelServerConfig
from gymsdk.config.read import load_config

VLLM = """\
policy_model:
  responses_api_models:
    vllm_model:
      entrypoint: app.py
      base_url: [http://a:1, http://b:2/v1]
      api_key: own-key
      model_name: Qwen/Qwen3-4B
      return_token_id_information: true
      uses_reasoning_parser: true
      replace_developer_role_with_system: false
      is_responses_native: true
      sampling_overrides: {temperature: 0.5}
      extra_body: {top_k: 20}
      chat_template_kwargs: {enable_thinking: false}
      default_headers: {Authorization: Bearer tell-nobody}
      num_workers: 4
"""
GYMSDK_MODEL = "policy_model:\n  responses_api_models:\n    gymsdk_model:\n      model: "


def get_model_config(deployment: Deployment) -> ModelServerConfig:
    [block] = deployment.get_servers("responses_api_models")
    assert isinstance(block.kind_settings, ModelServerConfig)
    return block.kind_settings


def options(deployment: Deployment) -> dict[str, Any]:
    return dict(get_model_config(deployment).options)


def test_every_setting_of_a_vllm_server_reaches_the_model_and_no_secret_is_shown(write: Write) -> None:
    write("a.yaml", VLLM)
    deployment = load_config(["a.yaml"], ["policy_api_key=policys-key"])
    part = get_model_config(deployment)
    assert part.name == "vllm/Qwen/Qwen3-4B"
    assert model(part.name, **part.options) is not None
    shown = repr(deployment) + deployment.model_dump_json() + str(list_settings(deployment))
    assert not [secret for secret in ("own-key", "tell-nobody", "policys-key") if secret in shown]
    assert options(deployment) == {
        "base_url": ("http://a:1/v1", "http://b:2/v1"),
        "apart": True,
        "api_key": SecretStr("own-key"),
        "tokens": True,
        "api": "responses",
        "pinned": {"temperature": 0.5},
        "extra_body": {"top_k": 20},
        "chat_template_kwargs": {"enable_thinking": False},
        "headers": {"Authorization": SecretStr("Bearer tell-nobody")},
    }
    assert tuple(deployment.ignored) == ("num_workers", "replace_developer_role_with_system")


@pytest.mark.parametrize("name", ["scripted/oracle", "scripted/null"])
def test_a_scripted_policy_needs_no_endpoint(write: Write, name: str) -> None:
    write("a.yaml", f"{GYMSDK_MODEL}{name}\n")
    part = get_model_config(load_config(["a.yaml"]))
    assert (part.name, dict(part.options)) == (name, {})


def test_gymsdk_model_uses_the_policys_endpoint_or_its_own(write: Write) -> None:
    write("env.yaml", "policy_base_url: http://p:1\npolicy_api_key: policys\n")
    write("a.yaml", f"{GYMSDK_MODEL}vllm/x\n")
    assert options(load_config(["a.yaml"])) == {
        "base_url": ("http://p:1/v1",),
        "apart": True,
        "api_key": SecretStr("policys"),
    }
    write("a.yaml", f"{GYMSDK_MODEL}endpoint/x\n      base_url: http://own:1\n      timeout: 5\n")
    assert options(load_config(["a.yaml"])) == {"base_url": ("http://own:1/v1",), "apart": True, "timeout": 5}


def test_thoughts_that_are_off_have_no_effect(write: Write) -> None:
    block = "gymsdk_model: {model: vllm/m, base_url: http://h/v1, thoughts: no}"
    write("a.yaml", f"policy_model:\n  responses_api_models:\n    {block}\n")
    assert "thoughts" not in options(load_config(["a.yaml"]))


def test_an_openai_block_with_another_base_url_needs_no_sdk(write: Write) -> None:
    write("env.yaml", "policy_base_url: http://p:1/v1\npolicy_model_name: x\n")
    deployment = load_config([], ["+config_paths=[responses_api_models/openai_model/configs/openai_model.yaml]"])
    assert (get_model_config(deployment).name, options(deployment)["api"]) == ("endpoint/x", "responses")


BUILT_IN = "+config_paths=[responses_api_models/vllm_model/configs/vllm_model.yaml]"


@pytest.mark.parametrize(
    ("file", "variables", "command_line", "key"),
    [
        ("url key", "", "", "files"),
        ("url", "key", "", None),
        ("key", "url", "", None),
        ("", "url key", "", "variables"),
        ("url key", "url key", "", "variables"),
        ("url key", "key", "url", "variables"),
        ("key", "", "url", None),
        ("url key", "", "url key", "words"),
        ("url", "", "key", None),
    ],
)
def test_a_key_is_sent_only_to_its_own_server(
    write: Write, monkeypatch: pytest.MonkeyPatch, file: str, variables: str, command_line: str, key: str | None
) -> None:
    names = {"url": "policy_base_url", "key": "policy_api_key"}
    text = {"url": "http://h:1/v1", "key": "files"}
    write("env.yaml", "policy_model_name: x\n" + "".join(f"{names[given]}: {text[given]}\n" for given in file.split()))
    for name in variables.split():
        value = {"url": "http://h:2/v1", "key": "variables"}[name]
        monkeypatch.setenv({"url": "GYMSDK_BASE_URL", "key": "GYMSDK_API_KEY"}[name], value)
    words = {"url": "http://h:3/v1", "key": "words"}
    overrides = [f"{names[given]}={words[given]}" for given in command_line.split()]
    deployment = load_config([], [BUILT_IN, *overrides])
    key_option = options(deployment).get("api_key")
    assert (key_option.get_secret_value() if key_option else None) == key
    assert bool(deployment.notes) == (key is None)


def test_a_key_that_other_users_can_read_causes_a_warning(write: Write) -> None:
    write("env.yaml", "policy_api_key: x\n").chmod(0o644)
    assert load_config([]).notes == ("env.yaml has a key that other users can read; run: chmod 600 env.yaml",)


def test_max_steps_of_an_agent_is_its_turn_budget(write: Write) -> None:
    write("a.yaml", "a: {responses_api_agents: {simple_agent: {max_steps: 7, tool_calls: 9, deadline: 60}}}\n")
    assert load_config(["a.yaml"]).servers[0].kind_settings == AgentServerConfig(turns=7, tool_calls=9, seconds=60)


def test_an_environment_server_limits_the_time_of_an_episode(write: Write) -> None:
    block = "{default_episode_timeout_seconds: 30, max_concurrent_episodes: 4}"
    write("a.yaml", f"e: {{environment_servers: {{single_agent_turn: {block}}}}}\n")
    deployment = load_config(["a.yaml"])
    assert deployment.servers[0].kind_settings == AgentServerConfig(seconds=30)
    assert tuple(deployment.ignored) == ("max_concurrent_episodes",)


def test_a_model_with_an_address_in_its_name_does_not_get_the_policys_key(write: Write) -> None:
    write("a.yaml", f"policy_base_url: http://a:1\npolicy_api_key: hush\n{GYMSDK_MODEL}vllm/x@http://b:2/v1\n")
    part = get_model_config(load_config(["a.yaml"]))
    assert (part.name, dict(part.options)) == ("vllm/x@http://b:2/v1", {})


def test_a_wrong_value_of_a_long_option_names_the_option(read_errors: ReadErrors) -> None:
    text = VLLM.replace("num_workers: 4", "propagate_context_overflow_errors: 3")
    (line,) = read_errors(text)
    assert "option 'propagate_context_overflow_errors'" in line


def test_headers_of_null_are_left_out_and_headers_that_cannot_be_sent_are_named(
    write: Write, read_errors: ReadErrors
) -> None:
    def build(headers: str) -> str:
        return VLLM.replace("{Authorization: Bearer tell-nobody}", headers)

    write("a.yaml", build("{X-None: null, X-Number: 3}"))
    headers = options(load_config(["a.yaml"]))["headers"]
    assert {name: value.get_secret_value() for name, value in headers.items()} == {"X-Number": "3"}
    for wrong, named in {
        "{X-List: [1]}": "should be a text, not a list",
        "{X-Object: {a: 1}}": "should be a text, not an object",
        '{X_Line: "a\\nb"}': "the value of 'X_Line' has a character",
        "{X Name: a}": "is no name of a header",
    }.items():
        (line,) = read_errors(build(wrong))
        assert named in line
