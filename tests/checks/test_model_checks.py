"""`gymsdk check --model`: sound adapters pass, and each check finds the defects that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from gymsdk import testing
from gymsdk.checks import models
from gymsdk.checks.models import CHECKS, ModelSubject, iter_results
from gymsdk.checks.report import Result
from gymsdk.errors import UsageError
from gymsdk.models.registry import model


@pytest.fixture(autouse=True)
def _provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the provider `faulty`."""
    info = tmp_path / "faulty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[gymsdk.models]\nfaulty = checks.faulty_models:build\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(models, "CLOSE_SECONDS", 1.0)


async def check(name: str, *ids: str) -> dict[str, Result]:
    """Return the results of the checks *ids*, of all without."""
    chosen = [check for check in CHECKS if not ids or check.id in ids]
    return {result.id: result async for result in iter_results(ModelSubject(name), chosen)}


@pytest.mark.parametrize("name", ["scripted/echo", "scripted/random", "scripted/null", "faulty/InProcess"])
async def test_models_of_this_process_pass_what_applies(name: str) -> None:
    statuses = {key: result.status for key, result in (await check(name)).items()}
    assert statuses == {
        "model.respond": "passed",
        "model.errors": "skipped",
        "model.token_ids": "skipped",
        "model.cancel": "passed",
        "model.close": "passed",
    }


async def test_a_sound_adapter_passes_all_checks_and_what_does_not_apply_is_skipped() -> None:
    results = await check("faulty/Sound")
    assert {result.status for result in results.values()} == {"passed"}, results
    assert (await check("faulty/WithoutClose", "model.close"))["model.close"].status == "skipped"
    result = (await check("scripted/oracle", "model.respond"))["model.respond"]
    assert (result.status, "needs an episode" in result.reason) == ("skipped", True)


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["vllm", "endpoint"])
async def test_an_engine_passes_all_checks(provider: str) -> None:
    async with testing.serve(testing.build_app(model("scripted/echo"), name="policy")) as url:
        results = await check(f"{provider}/policy@{url}")
    assert {result.status for result in results.values()} == {"passed"}, results


@pytest.mark.slow
async def test_a_hosted_model_passes_what_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    async with testing.serve(testing.build_app(model("scripted/echo"), name="policy")) as url:
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        results = await check(f"openai/policy@{url}")
    assert {name: result.status for name, result in results.items() if result.status != "passed"} == {
        "model.token_ids": "skipped"
    }


@pytest.mark.parametrize(
    ("name", "id", "problem"),
    [
        ("ChangesRequest", "model.respond", "changes its request"),
        ("ForgetsHistory", "model.respond", "model_raised: the model raised KeyError"),
        ("NotJson", "model.respond", "not plain JSON"),
        ("OneAtATime", "model.respond", "7 of 8 concurrent calls failed: busy"),
        ("OneObject", "model.respond", "one object as their response"),
        ("RaisesOther", "model.errors", "a request without a message: `respond` raises IndexError"),
        ("LeaksKey", "model.errors", "the answer 401 with an error: the message of the failure contains the API key"),
        ("AlwaysRetryable", "model.errors", "the answer 400 with an error: the failure says retryable=True"),
        ("NeverRetryable", "model.errors", "no server at the address: the failure says retryable=False"),
        ("HidesErrors", "model.errors", "the answer 500 with an error: `respond` returns a response"),
        ("DropsId", "model.token_ids", "does not have one number for each of the 1 sampled ids"),
        ("NoLogprobs", "model.token_ids", "does not have one number"),
        ("PositiveLogprob", "model.token_ids", "0.5 is no logarithm of a probability"),
        ("BreaksChain", "model.token_ids", "does not continue the ids of the first"),
        ("SwallowsCancel", "model.cancel", "a cancelled call returns a response instead of CancelledError"),
        ("SwallowsCancelInProcess", "model.cancel", "a cancelled call returns a response instead of CancelledError"),
        ("ConvertsCancel", "model.cancel", "a cancelled call raises Failed instead of CancelledError"),
        ("HangsAtClose", "model.close", "`aclose` has not ended after 1 seconds"),
        ("ClosesOnce", "model.close", "a second `aclose` raises RuntimeError: closed already"),
        ("LeavesTask", "model.close", "after `aclose` a task still runs"),
    ],
)
async def test_a_defect_is_found(name: str, id: str, problem: str) -> None:
    result = (await check(f"faulty/{name}", id))[id]
    assert result.status == "failed", result
    assert problem in "\n".join(finding.problem for finding in result.findings)


async def test_an_unknown_model_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="no model named 'nope/x'"):
        await check("nope/x")
