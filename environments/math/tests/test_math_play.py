from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from statistics import fmean

import pytest

import gymsdk
from gym_env_math.settings import MathConfig
from gym_env_math.shortcut import Kept
from gym_env_math.verdict import graded
from gymsdk import Environment, Unscorable, Verdict, WorkerLost

PUBLISHED = {
    "responses_create_params": {"input": [{"role": "user", "content": "Solve.\n\nWhat is 16 + 16?"}]},
    "question": "What is 16 + 16?",
    "expected_answer": "32",
}


@pytest.fixture
async def math() -> AsyncIterator[Environment]:
    async with gymsdk.load("math") as environment:
        yield environment


async def judged(environment: Environment, expected: str, *texts: str) -> Verdict:
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


async def test_verify_gives_the_reward_and_what_it_found(math: Environment):
    verdict = await judged(math, "\\(\\frac{1}{2}\\)", "so it is $\\boxed{0.5}$")
    assert verdict.model_dump() == {
        "reward": 1.0,
        "components": {},
        "grader_timeout": False,
        "expected_answer": "\\(\\frac{1}{2}\\)",
        "extracted_answer": "1/2",
        "library_reward": 1.0,
        "judge_evaluations": None,
    }


async def test_several_messages_are_one_text(math: Environment):
    assert (await judged(math, "32", "the answer is $\\boxed{3", "2}$")).reward == 1.0


async def test_a_reply_without_an_answer_is_wrong_and_says_so(math: Environment):
    verdict = await judged(math, "32")
    assert (verdict.reward, verdict.extracted_answer) == (0.0, None)


@pytest.mark.parametrize(
    "settings", [{"shortcut": False}, {"gold_cache": False}, {"shortcut": False, "gold_cache": False}]
)
async def test_neither_the_shortcut_nor_the_gold_cache_changes_a_verdict(math: Environment, settings: dict[str, bool]):
    async with gymsdk.load("math", **settings) as plain:
        for expected, text in (("32", "\\boxed{32}"), ("32", "\\boxed{33}"), ("\\{1, 2\\}", "$\\boxed{2, 1}$")):
            assert await judged(plain, expected, text) == await judged(math, expected, text)


async def test_the_same_answer_again_is_known_without_a_worker():
    kept = Kept()
    settings = MathConfig()
    first = await graded("\\frac{1}{2}", "so \\boxed{0.5}", settings, kept)
    assert (
        kept.get("\\frac{1}{2}", "0.5") == first == await graded("\\frac{1}{2}", "then $\\boxed{0.5}$", settings, kept)
    )


@pytest.mark.parametrize("expected", ["", "$", " \\( \\) "])
async def test_an_expected_answer_that_cannot_be_read_leaves_the_rollout_unscored(math: Environment, expected: str):
    with pytest.raises(Unscorable, match="cannot read the expected answer") as error:
        await judged(math, expected, "\\boxed{5}")
    assert error.value.kind == "gold_unreadable"


async def _granted(judging: Callable[[], Awaitable[Verdict]], times: int = 3) -> Verdict:
    """What *judging* gives; asked again where a busy machine does not grant it 10 s of processor time in 30 s."""
    try:
        return await judging()
    except WorkerLost:
        if times == 1:
            raise
        return await _granted(judging, times - 1)


@pytest.mark.timeout(240)
async def test_an_answer_that_spends_the_grader_s_budget_is_wrong_and_says_so(math: Environment):
    verdict = await _granted(lambda: judged(math, "\\frac{1}{2}", "\\boxed{10^{10^{10}}}"))
    assert verdict.model_dump() | {"components": {}} == {
        "reward": 0.0,
        "components": {},
        "grader_timeout": True,
        "expected_answer": "\\frac{1}{2}",
        "extracted_answer": None,
        "library_reward": 0.0,
        "judge_evaluations": None,
    }


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
async def test_hostile_answers_are_wrong_and_can_be_written_as_json(math: Environment, text: str):
    verdict = await judged(math, "\\frac{1}{2}", text)
    assert verdict.reward == 0.0
    json.dumps(verdict.model_dump(), ensure_ascii=False).encode()


async def test_the_oracle_solves_every_example(math: Environment):
    assert (await mean(math, "scripted/oracle", "example", 11))[0] == 1.0


@pytest.mark.parametrize("split", ["example", "validation"])
@pytest.mark.parametrize("model", ["scripted/null", "scripted/echo", "scripted/random"])
async def test_a_policy_without_understanding_earns_at_most_its_chance(math: Environment, model: str, split: str):
    reward, chance = await mean(math, model, split, 120)
    assert reward <= chance


async def test_a_published_row_keeps_its_fields(math: Environment):
    row = PUBLISHED | {"id": 7, "source": {"name": "somewhere"}}
    rollout = await gymsdk.play(math, gymsdk.model("scripted/oracle"), row)
    assert (rollout.reward, rollout.row) == (1.0, row)


async def test_claims_name_the_other_right_forms_and_what_luck_earns(math: Environment):
    whole = await math.claims(math.read(PUBLISHED))
    fraction = await math.claims(math.read(PUBLISHED | {"expected_answer": "\\frac{1}{2}", "other_answers": ["1/2"]}))
    assert (whole.chance, whole.variants) == (0.02, [])
    assert (fraction.maximum, fraction.chance, fraction.variants) == (1.0, 0.0, ["\\boxed{1/2}"])


async def test_metrics_are_means_by_family_and_difficulty(math: Environment):
    tasks = [task for task, _ in zip(math.tasks("validation"), range(22), strict=False)]
    rollouts = [await gymsdk.play(math, gymsdk.model("scripted/oracle"), task) for task in tasks]
    figures = await math.metrics(rollouts)
    assert set(figures.values()) == {1.0}
    by = {("family", "fractions"), ("family", "intervals"), ("difficulty", tasks[0].difficulty)}
    assert {f"{name}={value}/mean/reward" for name, value in by} <= figures.keys()


async def test_rows_without_a_family_have_no_figures_by_family(math: Environment):
    rollout = await gymsdk.play(math, gymsdk.model("scripted/oracle"), PUBLISHED)
    assert await math.metrics([rollout]) == {"symbolic_accuracy": 1.0}


async def test_metrics_take_the_host_s_own_verdict(math: Environment):
    played = await gymsdk.play(math, gymsdk.model("scripted/oracle"), PUBLISHED | {"family": "sums"})
    spent = played.model_copy(update={"reward": 0.0, "verdict": Verdict(reward=0.0, grader_timeout=True)})
    assert await math.metrics([played, spent]) == {"family=sums/mean/reward": 0.5, "symbolic_accuracy": 1.0}
