"""Secrets are redacted in the shown settings, by key and by source."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from config.conftest import Write, list_settings
from typer.testing import CliRunner

from gymsdk.cli import app
from gymsdk.config.read import load_config
from gymsdk.config.show import is_secret

SERVERS = """
shared: {{place: '${{oc.env:PLACE_OF_IT}}'}}
policy_base_url: http://127.0.0.1:1/v1
policy_api_key: none
policy_model_name: ${{oc.env:MODEL_OF_IT}}
policy_model:
  responses_api_models:
    openai_model:
      entrypoint: app.py
      openai_base_url: ${{policy_base_url}}
      openai_api_key: ${{policy_api_key}}
      openai_model: ${{policy_model_name}}
      extra_body: {{max_tokens: 7, inner: {{session_cookie: hush-{0}, dsn: hush-{0}, place: '${{shared.place}}'}}}}
"""


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "apiKey", "X-Api-Key", "token", "hf_token", "accessToken", "authtoken", "api_tokens", "secret"),
        *(
            "db_password",
            "passwd",
            "credentials",
            "auth",
            "bearer",
            "session_cookie",
            "dsn",
            "client_secret_id",
            "pass",
        ),
    ],
)
def test_a_secret_is_recognized_by_its_key(key: str) -> None:
    assert is_secret((key,))
    assert is_secret(("one", "responses_api_models", "vllm_model", "extra_body", "deep", key))
    assert is_secret(("one", "responses_api_models", "vllm_model", "extra_body", key, "inner"))


@pytest.mark.parametrize(
    "key",
    [
        *(
            "max_tokens",
            "max_output_tokens",
            "tokens",
            "token_ids",
            "return_token_ids",
            "prompt_cache_key",
            "token_file",
        ),
        *("tls_key", "author", "monkey", "tokenizer", "passage", "insecure", "model", "pass_at_k", "token_budget"),
    ],
)
def test_values_that_are_not_secret_are_shown(key: str) -> None:
    assert not is_secret((key,))


def test_a_server_named_like_a_secret_is_shown() -> None:
    assert not is_secret(("secret_keys", "resources_servers", "secret_keys", "host"))


def test_values_from_variables_and_references_to_them_are_redacted(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLACE_OF_IT", "hush-place")
    monkeypatch.setenv("MODEL_OF_IT", "hush-model")
    write("a.yaml", SERVERS.format("body"))
    settings = list_settings(load_config(["a.yaml"]))
    assert not [each for each in settings.items() if "hush" in str(each)]
    assert settings["policy_model_name"][0] == "***"
    path = "policy_model.responses_api_models.openai_model"
    assert settings[f"{path}.extra_body.max_tokens"][0] == 7
    assert settings[f"{path}.openai_base_url"][0] == "http://127.0.0.1:1/v1"


def test_a_secret_field_of_an_environment_is_not_shown(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic import SecretStr

    from gymsdk import Config
    from gymsdk.plugins import registry

    class Own(Config):
        plain: str = ""
        pin: SecretStr | None = None

    monkeypatch.setattr(registry, "load", lambda _: SimpleNamespace(config=Own()))
    block = "entrypoint: app.py, environment: own, config: {plain: seen, pin: hush}"
    write("a.yaml", f"one:\n  resources_servers:\n    gymsdk: {{{block}}}\n")
    result = CliRunner().invoke(app, ["config", "--config", "a.yaml"])
    assert "seen" in result.output, result.output
    assert "hush" not in result.output
