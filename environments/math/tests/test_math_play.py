from __future__ import annotations

import json
from collections.abc import AsyncIterator
from statistics import fmean

import pytest

import gymsdk
from gym_env_math import library
from gym_env_math.grading import wrap_in_box
from gymsdk import Environment, Unscorable, Verdict
from gymsdk.errors import BadConfig
from gymsdk.graders.maths import GRADER
from gymsdk.responses import build_message, build_response
from gymsdk.types import Item

PUBLISHED = {
    "responses_create_params": {"input": [{"role": "user", "content": "Solve.\n\nWhat is 16 + 16?"}]},
    "question": "What is 16 + 16?",
    "expected_answer": "32",
}


class FixedReply:
    name = "fixed"

    def __init__(self, text: str) -> None:
        self.text = text

    async def respond(self, request: Item, *, episode: str | None = None) -> Item:
        return build_response([build_message(self.text)], model="fixed")


@pytest.fixture
async def math() -> AsyncIterator[Environment]:
    async with gymsdk.load("math") as environment:
        yield environment


async def verify_texts(environment: Environment, expected: str, *texts: str) -> Verdict:
    episode = await environment.reset(PUBLISHED | {"expected_answer": expected})
    for text in texts:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        episode.transcript.items.append({"type": "message", "role": "assistant", "content": content})
    return await environment.verify(episode)


async def mean(environment: Environment, model: str, split: str, limit: int) -> tuple[float, float]:
    rewards, chances = [], []
    for row, task in zip(range(limit), environment.tasks(split), strict=False):
        rollout = await gymsdk.play(environment, gymsdk.model(model), task, seed=row)
        assert rollout.outcome == "scored", rollout.failure
        rewards.append(rollout.reward)
        chances.append((await environment.claims(task)).chance)
    return fmean(rewards), fmean(chances)


async def test_verify_returns_the_reward_and_the_extracted_answer(math: Environment):
    verdict = await verify_texts(math, "\\(\\frac{1}{2}\\)", "so it is $\\boxed{0.5}$")
    assert verdict.model_dump() == {
        "reward": 1.0,
        "components": {},
        "grader_timeout": False,
        "expected_answer": "\\(\\frac{1}{2}\\)",
        "extracted_answer": "1/2",
        "written_answer": "0.5",
        "library_reward": 1.0,
        "grader": "gymsdk.graders.maths",
        "grader_version": GRADER.partition("/")[2],
        "undecided": False,
        "judge_evaluations": None,
    }


async def test_several_messages_are_graded_as_one_text(math: Environment):
    assert (await verify_texts(math, "32", "the answer is $\\boxed{3", "2}$")).reward == 1.0


async def test_a_reply_without_an_answer_is_wrong_and_has_no_extracted_answer(math: Environment):
    verdict = await verify_texts(math, "32")
    assert (verdict.reward, verdict.extracted_answer) == (0.0, None)


@pytest.mark.parametrize("setting", ["shortcut", "gold_cache"])
def test_a_setting_of_version_0_1_is_accepted_with_a_warning(setting: str):
    with pytest.warns(FutureWarning, match=f"setting {setting} of math has no effect"):
        gymsdk.load("math", **{setting: False})


@pytest.mark.slow
async def test_math_verify_grades_as_before_version_0_2():
    async with gymsdk.load("math", grader="math-verify") as math:
        right = await verify_texts(math, "ABCD", "\\boxed{BACD}")
        assert (right.reward, right.grader, right.grader_version) == (1.0, "math-verify", library.get_version())
    async with gymsdk.load("math") as math:
        assert (await verify_texts(math, "ABCD", "\\boxed{BACD}")).reward == 0.0


UNDECIDED = (r"\int_0^1 x^2 \, dx", r"\boxed{\frac{1}{3}}")


@pytest.fixture
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)


async def test_an_undecided_answer_is_unscorable(math: Environment, without_library: None):
    with pytest.raises(Unscorable, match=r"cannot be compared: .* is not evaluated") as error:
        await verify_texts(math, *UNDECIDED)
    assert error.value.kind == "undecided"
    async with gymsdk.load("math", undecided="zero") as strict:
        verdict = await verify_texts(strict, *UNDECIDED)
    assert (verdict.reward, verdict.undecided) == (0.0, True)


@pytest.mark.slow
async def test_math_verify_decides_what_the_own_grader_does_not(math: Environment):
    verdict = await verify_texts(math, *UNDECIDED)
    assert (verdict.reward, verdict.undecided, verdict.grader) == (1.0, True, "gymsdk.graders.maths")


async def test_the_share_of_undecided_answers_is_a_metric(without_library: None):
    gold, text = UNDECIDED
    row = PUBLISHED | {"expected_answer": gold}
    async with gymsdk.load("math", undecided="zero") as math:
        rollouts = [await gymsdk.play(math, FixedReply(reply), row) for reply in (wrap_in_box(gold), text)]
        assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]
        assert (await math.metrics(rollouts))["undecided"] == 0.5


def test_math_verify_as_grader_needs_the_extra(without_library: None):
    with pytest.raises(BadConfig, match=r"gym-env-math\[sympy\]"):
        gymsdk.load("math", grader="math-verify")


@pytest.mark.parametrize("expected", ["", "$", " \\( \\) "])
async def test_an_unreadable_expected_answer_makes_the_rollout_unscorable(math: Environment, expected: str):
    with pytest.raises(Unscorable, match=r"expected answer .* cannot be read") as error:
        await verify_texts(math, expected, "\\boxed{5}")
    assert error.value.kind == "gold_unreadable"


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_an_answer_that_exceeds_the_grader_budget_is_wrong_with_grader_timeout():
    async with gymsdk.load("math", grader="math-verify") as math:
        verdict = await verify_texts(math, "\\frac{1}{2}", "\\boxed{10^{10^{10}}}")
    assert (verdict.reward, verdict.grader_timeout, verdict.extracted_answer) == (0.0, True, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "(" * 20_000,
        "\\sqrt{" * 2_000,
        "\\boxed{" * 5_000 + "5" + "}" * 5_000,
        "x" * 1_000_000,
        "\x00 \ud800 \\boxed{\udfff}",
        "\\boxed{\ud800}",
        "\\boxed{" + "9" * 10_000 + "}",
    ],
)
async def test_malicious_answers_are_wrong_and_serializable_as_json(math: Environment, text: str):
    verdict = await verify_texts(math, "\\frac{1}{2}", text)
    assert verdict.reward == 0.0
    json.dumps(verdict.model_dump(), ensure_ascii=False).encode()


@pytest.mark.slow
async def test_the_oracle_solves_every_example(math: Environment):
    assert (await mean(math, "scripted/oracle", "example", 11))[0] == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("split", ["example", "validation"])
@pytest.mark.parametrize("model", ["scripted/null", "scripted/echo", "scripted/random"])
async def test_trivial_policies_earn_at_most_the_claimed_chance(math: Environment, model: str, split: str):
    reward, chance = await mean(math, model, split, 120)
    assert reward <= chance


async def test_a_published_row_keeps_its_fields(math: Environment):
    row = PUBLISHED | {"id": 7, "source": {"name": "somewhere"}}
    rollout = await gymsdk.play(math, gymsdk.model("scripted/oracle"), row)
    assert (rollout.reward, rollout.row) == (1.0, row)


async def test_claims_contain_other_correct_forms_and_the_chance_of_a_guess(math: Environment):
    whole = await math.claims(math.read(PUBLISHED))
    fraction = await math.claims(math.read(PUBLISHED | {"expected_answer": "\\frac{1}{2}", "other_answers": ["1/2"]}))
    assert (whole.chance, whole.variants) == (0.02, [])
    assert (fraction.maximum, fraction.chance, fraction.variants) == (1.0, 0.0, ["\\boxed{1/2}"])


@pytest.mark.slow
async def test_metrics_are_means_by_family_and_difficulty(math: Environment):
    tasks = [task for task, _ in zip(math.tasks("validation"), range(22), strict=False)]
    rollouts = [await gymsdk.play(math, gymsdk.model("scripted/oracle"), task) for task in tasks]
    figures = await math.metrics(rollouts)
    assert figures.pop("undecided") == 0.0
    assert set(figures.values()) == {1.0}
    by = {("family", "fractions"), ("family", "intervals"), ("difficulty", tasks[0].difficulty)}
    assert {f"{name}={value}/mean/reward" for name, value in by} <= figures.keys()


async def test_rows_without_a_family_have_no_metrics_by_family(math: Environment):
    rollout = await gymsdk.play(math, gymsdk.model("scripted/oracle"), PUBLISHED)
    assert await math.metrics([rollout]) == {"symbolic_accuracy": 1.0, "undecided": 0.0}


async def test_metrics_accept_a_verdict_of_the_host(math: Environment):
    played = await gymsdk.play(math, gymsdk.model("scripted/oracle"), PUBLISHED | {"family": "sums"})
    spent = played.model_copy(update={"reward": 0.0, "verdict": Verdict(reward=0.0, grader_timeout=True)})
    assert await math.metrics([played, spent]) == {
        "family=sums/mean/reward": 0.5,
        "symbolic_accuracy": 1.0,
        "undecided": 0.0,
    }
