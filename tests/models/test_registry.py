"""Models by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import gymsdk
from gymsdk.errors import BadModelOption, UnknownModel
from gymsdk.models.endpoint import Endpoint
from gymsdk.models.vllm import Vllm
from gymsdk.settings import VARIABLES
from gymsdk.types import Model

URL = "http://127.0.0.1:1/v1"


@pytest.fixture(autouse=True)
def _nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in [*VARIABLES.values(), "OPENAI_API_KEY", "OPENAI_BASE_URL"]:
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(("provider", "kind"), [("endpoint", Endpoint), ("vllm", Vllm)])
def test_a_provider_builds_its_model_whatever_slashes_the_name_has(provider: str, kind: type) -> None:
    built = gymsdk.model(f"{provider}/Qwen/Qwen3-4B", base_url=URL)
    assert isinstance(built, kind)
    assert isinstance(built, Model)
    assert vars(built)["name"] == "Qwen/Qwen3-4B"


def test_scripted_policies_are_models_too() -> None:
    assert isinstance(gymsdk.model("scripted/null"), Model)


@pytest.mark.parametrize(
    ("name", "nearest"), [("opena/gpt-5", "openai"), ("vlm/x", "vllm"), ("script/null", "scripted")]
)
def test_an_unknown_provider_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownModel, match=f"'{name}'; did you mean '{nearest}'"):
        gymsdk.model(name)


@pytest.mark.parametrize("name", ["", "zzz", "gpt-5"])
def test_an_unknown_provider_is_answered_with_all_there_are(name: str) -> None:
    with pytest.raises(UnknownModel, match="scripted/NAME, openai/NAME, vllm/NAME, endpoint/NAME"):
        gymsdk.model(name)


@pytest.mark.parametrize("provider", ["vllm", "endpoint"])
def test_a_missing_base_url_is_refused_when_built(provider: str) -> None:
    with pytest.raises(BadModelOption, match=rf"{provider}/x needs a base URL.*--base-url.*GYMSDK_BASE_URL"):
        gymsdk.model(f"{provider}/x")


def test_the_base_url_may_come_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "env.yaml").write_text(f"policy_base_url: {URL}\npolicy_model_name: Qwen/Qwen3-4B")
    assert vars(gymsdk.model("vllm"))["name"] == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"base_url": "nowhere"}, "'base_url'"), ({"timeout": 0}, "'timeout'"), ({"temprature": 1}, "'temprature'")],
)
def test_a_wrong_option_is_refused_when_built(options: dict[str, object], complaint: str) -> None:
    with pytest.raises(BadModelOption, match=f"{complaint} of vllm/x"):
        gymsdk.model("vllm/x", **({"base_url": URL} | options))


def test_asking_for_a_scripted_model_imports_no_client() -> None:
    script = "import sys, gymsdk; gymsdk.model('scripted/null'); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"aiohttp", "openai", "omegaconf", "gymsdk.models.vllm"} & set(loaded)
