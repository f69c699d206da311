"""Secrets are redacted in the shown settings, by key and by source."""

from __future__ import annotations

import pytest
from config.conftest import Write, list_settings
from typer.testing import CliRunner

from gymsdk.cli import app
from gymsdk.config.read import load_config
from gymsdk.config.show import is_secret

SERVERS = """
shared: {place: '${oc.env:PLACE}', token: '${oc.env:PLACE_OF_TOKEN}', url: '${oc.env:STORE_URL}', name: '${.place}'}
secrets: {store: '${oc.env:IN_SECTION}'}
wandb_api_key: ${oc.env:WITH_WANDB}
policy_base_url: http://127.0.0.1:1/v1
policy_api_key: ${oc.env:POLICY,none}
policy_model_name: ${oc.env:MODEL_OF_IT}
default_host: ${oc.select:policy_model.responses_api_models.openai_model.extra_body.both}
policy_model:
  responses_api_models:
    openai_model:
      entrypoint: app.py
      openai_base_url: ${policy_base_url}
      openai_api_key: ${policy_api_key}
      openai_model: ${policy_model_name}
      openai_default_headers: {X-Team: hush-team}
      extra_body:
        max_tokens: 7
        region: ${oc.env:REGION,eu}
        regions: ['${oc.env:REGION,eu}', other]
        again: ${shared.place}
        relative: ${shared.name}
        inner: {session_cookie: hush-body, dsn: hush-body, spot: '${shared.token}', url: '${shared.url}'}
        by_name: ${oc.env:DB_PASSWORD}
        composed: ${oc.env:${oc.env:NAME_OF_IT}}
        default: ${oc.env:UNSET,${policy_api_key}}
        both: ${oc.env:BOTH}
        with_wandb: ${oc.env:WITH_WANDB}
        in_section: ${secrets.store}
        login: ${oc.env:MYSQL_PWD}
        folder: ${oc.env:PWD}
        database: ${oc.env:DATABASE}
        store: ${oc.env:STORE}
        notify: ${oc.env:SLACK_WEBHOOK}
        secret_mapping: {deep: '${oc.env:BOTH}'}
        of_function: ${oc.env:CHAINED}
        my_password: ${oc.select:policy_model.responses_api_models.openai_model.extra_body.of_function}
"""


@pytest.mark.parametrize(
    "key",
    [
        *("api_key", "apiKey", "X-Api-Key", "token", "hf_token", "accessToken", "authtoken", "api_tokens", "secret"),
        *("db_password", "passwd", "credentials", "auth", "bearer", "session_cookie", "dsn", "pass"),
        *("client_secret_id", "db_pwd", "DB_CREDS", "storage_connection_string", "MY_JWT", "SLACK_WEBHOOK"),
        *("slackWebhookUrl", "SSH_PRIVATEKEY", "MYSQLPWD"),
    ],
)
def test_a_secret_is_recognized_by_its_key(key: str) -> None:
    assert is_secret((key,))
    assert is_secret(("one", "responses_api_models", "vllm_model", "extra_body", "deep", key))
    assert is_secret(("one", "responses_api_models", "vllm_model", "extra_body", key, "inner"))


@pytest.mark.parametrize(
    "key",
    [
        *("max_tokens", "max_output_tokens", "tokens", "token_ids", "return_token_ids", "prompt_cache_key"),
        *("token_file", "tls_key", "author", "monkey", "tokenizer", "passage", "insecure", "model", "pass_at_k"),
        *("token_budget", "turkey"),
    ],
)
def test_values_that_are_not_secret_are_shown(key: str) -> None:
    assert not is_secret((key,))
    # A server may be named like a secret.
    assert not is_secret(("secret_keys", "resources_servers", "secret_keys", "host"))


def test_values_from_variables_are_redacted_if_they_are_secret(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        **dict.fromkeys(("PLACE_OF_TOKEN", "POLICY", "DB_PASSWORD", "COMPOSED", "BOTH"), "hush"),
        **dict.fromkeys(("CHAINED", "WITH_WANDB", "IN_SECTION", "MYSQL_PWD", "SLACK_WEBHOOK"), "hush"),
        "STORE": "reader:hush@db:5432/tasks",
        "PWD": "/srv",
        "DATABASE": "Server=db;UserPassword=hush",
        "PLACE": "oslo",
        "MODEL_OF_IT": "m-7",
        "NAME_OF_IT": "COMPOSED",
        "STORE_URL": "https://user:hu@sh@host/v1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    write("a.yaml", SERVERS)
    settings = {name: value for name, (value, _) in list_settings(load_config(["a.yaml"])).items()}
    assert not [setting for setting in settings.items() if "hu@sh" in str(setting) or "hush" in str(setting)]
    body = "policy_model.responses_api_models.openai_model.extra_body"
    shown = {
        "policy_model_name": "m-7",
        "policy_model.responses_api_models.openai_model.openai_model": "m-7",
        f"{body}.max_tokens": 7,
        f"{body}.region": "eu",
        f"{body}.regions": ["eu", "other"],
        f"{body}.again": "oslo",
        f"{body}.folder": "/srv",
        f"{body}.relative": "oslo",
    }
    assert {name: settings[name] for name in shown} == shown
    hidden = ("both", "with_wandb", "of_function", "by_name", "composed", "default", "inner.spot", "inner.url")
    assert {settings[f"{body}.{name}"] for name in (*hidden, "in_section", "login", "database", "store", "notify")} | {
        settings["default_host"]
    } == {"***"}


def test_a_secret_field_of_an_environment_is_not_shown(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    from pydantic import SecretStr

    from gymsdk import Config
    from gymsdk.plugins import registry

    class Own(Config):
        plain: str = ""
        pin: SecretStr | None = None

    monkeypatch.setattr(registry, "load_config_type", lambda _: Own)
    monkeypatch.setenv("PIN_OF_IT", "hush")
    server = "entrypoint: app.py, environment: own, config: {plain: seen, pin: '${oc.env:PIN_OF_IT}'}"
    write("a.yaml", f"default_host: '${{oc.env:PIN_OF_IT}}'\none:\n  resources_servers:\n    gymsdk: {{{server}}}\n")
    result = CliRunner().invoke(app, ["config", "--config", "a.yaml"])
    assert "seen" in result.output, result.output
    assert "hush" not in result.output
