"""Models are built from their names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gymsdk
from gymsdk.environment import build_config
from gymsdk.errors import BadModelOption, UnknownModel, UsageError
from gymsdk.models.endpoint import Endpoint
from gymsdk.models.options import ENVIRONMENT_VARIABLES
from gymsdk.testing.endpoint import build_app, serve
from gymsdk.types import Model

URL = "http://127.0.0.1:1/v1"


@pytest.fixture(autouse=True)
def _clear_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in [*ENVIRONMENT_VARIABLES.values(), "OPENAI_API_KEY", "OPENAI_BASE_URL"]:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize("provider", ["endpoint", "vllm"])
def test_a_model_name_may_contain_slashes_and_the_repr_has_no_secret(provider: str) -> None:
    secrets = {"api_key": "sk-a", "headers": {"X": "sk-b"}}
    built = gymsdk.model(f"{provider}/Qwen/Qwen3-4B", base_url=[URL, "http://127.0.0.1:2/v1"], **secrets)
    assert isinstance(built, Endpoint)
    assert repr(built) == f"{provider}/Qwen/Qwen3-4B@{URL},http://127.0.0.1:2/v1"
    assert isinstance(built, Model)
    assert vars(built)["name"] == "Qwen/Qwen3-4B"
    assert isinstance(gymsdk.model("scripted/null"), Model)
    with pytest.raises(BadModelOption, match=rf"{provider}/x needs a base URL.*--base-url.*GYMSDK_BASE_URL"):
        gymsdk.model(f"{provider}/x")


ALL = "endpoint/NAME, openai/NAME, scripted/NAME, vllm/NAME"


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("opena/model", "'opena/model'; did you mean 'openai'"),
        ("vlm/x", "'vlm/x'; did you mean 'vllm'"),
        ("script/null", "'script/null'; did you mean 'scripted'"),
        *((name, ALL) for name in ("", "zzz", "gpt-5")),
    ],
)
def test_an_unknown_provider_is_answered_with_the_nearest_or_all_providers(name: str, answer: str) -> None:
    with pytest.raises(UnknownModel, match=answer):
        gymsdk.model(name)


def test_the_base_url_can_come_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text(f"policy_base_url: {URL}\npolicy_model_name: Qwen/Qwen3-4B")
    assert vars(gymsdk.model("vllm"))["name"] == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    ("options", "message"),
    [({"base_url": "nowhere"}, "'base_url'"), ({"timeout": 0}, "'timeout'"), ({"temprature": 1}, "'temprature'")],
)
def test_a_wrong_option_is_rejected_when_the_model_is_built(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadModelOption, match=f"{message} of vllm/x"):
        gymsdk.model("vllm/x", **({"base_url": URL} | options))


@pytest.mark.slow
def test_building_a_scripted_model_imports_no_client() -> None:
    script = "import sys, gymsdk; gymsdk.model('scripted/null'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"aiohttp", "openai", "omegaconf", "gymsdk.models.vllm"} & set(loaded)


def read_upstream(name: str, **options: object) -> tuple[str, str | None, str | None]:
    """Return the name, base URL and key of a built model."""
    built = gymsdk.model(name, **options)
    used = built.options
    return built.name, ",".join(used.base_url), used.api_key and used.api_key.get_secret_value()


@pytest.mark.parametrize("provider", ["vllm", "endpoint"])
def test_an_address_in_a_name_does_not_get_the_policys_key(
    provider: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "env.yaml").write_text(f"policy_base_url: {URL}\npolicy_api_key: sk-file")
    (tmp_path / "env.yaml").chmod(0o600)
    monkeypatch.setenv("GYMSDK_API_KEY", "sk-variable")
    judge = "http://127.0.0.1:2/v1"
    name = f"{provider}/Qwen/Qwen3@v2@{judge}"
    assert read_upstream(name) == ("Qwen/Qwen3@v2", judge, None)
    assert read_upstream(name, base_url=URL, api_key="sk-option") == ("Qwen/Qwen3@v2", judge, None)
    assert read_upstream(name, api_key="sk-option") == ("Qwen/Qwen3@v2", judge, "sk-option")
    monkeypatch.setenv("GYMSDK_BASE_URL", URL)
    assert read_upstream(name) == ("Qwen/Qwen3@v2", judge, None)


def test_a_key_that_others_can_read_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "env.yaml").write_text(f"policy_base_url: {URL}\npolicy_api_key: sk-file")
    (tmp_path / "env.yaml").chmod(0o644)
    monkeypatch.chdir(tmp_path)
    assert [read_upstream("vllm/m")[2] for _ in range(2)] == ["sk-file"] * 2
    warned = [record.getMessage() for record in caplog.records]
    assert warned == [f"{tmp_path}/env.yaml has a key that other users can read; run: chmod 600 {tmp_path}/env.yaml"]


def test_the_addresses_in_a_name_get_the_policys_key_only_if_all_are_the_policys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GYMSDK_API_KEY", "sk-variable")
    assert read_upstream(f"vllm/m@{URL}")[2] is None
    assert read_upstream(f"vllm/m@{URL}", base_url=URL)[2] == "sk-variable"
    other = "http://127.0.0.1:2/v1"
    both = f"{URL},{other}"
    assert read_upstream(f"vllm/m@{both}") == ("m", both, None)
    assert read_upstream(f"vllm/m@{both}", base_url=URL) == ("m", both, None)
    assert read_upstream(f"vllm/m@{both}", base_url=[other, URL]) == ("m", both, "sk-variable")
    monkeypatch.setenv("GYMSDK_BASE_URL", both)
    assert read_upstream(f"vllm/m@{other}") == ("m", other, "sk-variable")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pinned": {"top_k": 1}}, "sends no requests"),
        ({"tokens": True}, "sends no requests"),
        ({"base_url": URL}, "has no address"),
        ({"api": "chat"}, "has no address"),
    ],
)
def test_a_scripted_policy_rejects_request_options_and_a_base_url(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadModelOption, match=f"runs in this process and {message}"):
        gymsdk.model("scripted/null", **options)


@pytest.mark.parametrize("provider", ["vllm", "endpoint", "openai", "vlm"])
def test_a_password_in_the_address_of_a_name_is_rejected_and_not_repeated(provider: str) -> None:
    with pytest.raises(UsageError) as caught:
        gymsdk.model(f"{provider}/m@http://me:hush@127.0.0.1:1/v1", api_key="x")
    assert provider == "vlm" or "leave user and password out" in str(caught.value)
    assert "hush" not in str(caught.value)


async def test_a_judge_may_have_a_separate_server(tmp_path: Path) -> None:
    class Judged(gymsdk.Config):
        judge: gymsdk.Model | None = None

    (tmp_path / "env.yaml").write_text(f"policy_base_url: {URL}")
    async with serve(build_app(gymsdk.model("scripted/echo"))) as url:
        config = build_config("judged", Judged, {"judge": f"vllm/Qwen@{url}"})
        assert isinstance(config, Judged)
        assert config.judge
        assert (await config.judge.respond({"input": "hi"}))["status"] == "completed"
