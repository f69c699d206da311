from __future__ import annotations

import json
from collections.abc import AsyncIterator
from statistics import fmean

import pytest

import gymsdk
from gym_env_math.grading import GradeCache, grade_text
from gym_env_math.rows import MathConfig
from gymsdk import Environment, Unscorable, Verdict

PUBLISHED = {
    "responses_create_params": {"input": [{"role": "user", "content": "Solve.\n\nWhat is 16 + 16?"}]},
    "question": "What is 16 + 16?",
    "expected_answer": "32",
}


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
        "library_reward": 1.0,
        "judge_evaluations": None,
    }


async def test_several_messages_are_graded_as_one_text(math: Environment):
    assert (await verify_texts(math, "32", "the answer is $\\boxed{3", "2}$")).reward == 1.0


async def test_a_reply_without_an_answer_is_wrong_and_has_no_extracted_answer(math: Environment):
    verdict = await verify_texts(math, "32")
    assert (verdict.reward, verdict.extracted_answer) == (0.0, None)


@pytest.mark.parametrize(
    "settings", [{"shortcut": False}, {"gold_cache": False}, {"shortcut": False, "gold_cache": False}]
)
async def test_neither_the_shortcut_nor_the_gold_cache_changes_a_verdict(math: Environment, settings: dict[str, bool]):
    async with gymsdk.load("math", **settings) as plain:
        for expected, text in (("32", "\\boxed{32}"), ("32", "\\boxed{33}"), ("\\{1, 2\\}", "$\\boxed{2, 1}$")):
            assert await verify_texts(plain, expected, text) == await verify_texts(math, expected, text)


async def test_a_repeated_answer_is_graded_without_a_worker():
    cache = GradeCache()
    settings = MathConfig()
    first = await grade_text("\\frac{1}{2}", "so \\boxed{0.5}", settings, cache)
    assert (
        cache.get("\\frac{1}{2}", "0.5")
        == first
        == await grade_text("\\frac{1}{2}", "then $\\boxed{0.5}$", settings, cache)
    )


@pytest.mark.parametrize("expected", ["", "$", " \\( \\) "])
async def test_an_unreadable_expected_answer_makes_the_rollout_unscorable(math: Environment, expected: str):
    with pytest.raises(Unscorable, match="cannot read the expected answer") as error:
        await verify_texts(math, expected, "\\boxed{5}")
    assert error.value.kind == "gold_unreadable"


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_an_answer_that_exceeds_the_grader_budget_is_wrong_with_grader_timeout(math: Environment):
    verdict = await verify_texts(math, "\\frac{1}{2}", "\\boxed{10^{10^{10}}}")
    assert verdict.model_dump() | {"components": {}} == {
        "reward": 0.0,
        "components": {},
        "grader_timeout": True,
        "expected_answer": "\\frac{1}{2}",
        "extracted_answer": None,
        "library_reward": 0.0,
        "judge_evaluations": None,
    }


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
    assert set(figures.values()) == {1.0}
    by = {("family", "fractions"), ("family", "intervals"), ("difficulty", tasks[0].difficulty)}
    assert {f"{name}={value}/mean/reward" for name, value in by} <= figures.keys()


async def test_rows_without_a_family_have_no_metrics_by_family(math: Environment):
    rollout = await gymsdk.play(math, gymsdk.model("scripted/oracle"), PUBLISHED)
    assert await math.metrics([rollout]) == {"symbolic_accuracy": 1.0}


async def test_metrics_accept_a_verdict_of_the_host(math: Environment):
    played = await gymsdk.play(math, gymsdk.model("scripted/oracle"), PUBLISHED | {"family": "sums"})
    spent = played.model_copy(update={"reward": 0.0, "verdict": Verdict(reward=0.0, grader_timeout=True)})
    assert await math.metrics([played, spent]) == {"family=sums/mean/reward": 0.5, "symbolic_accuracy": 1.0}
