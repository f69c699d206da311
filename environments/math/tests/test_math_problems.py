from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from math_direct import grade_all
from pydantic import ValidationError

import gymsdk
from gym_env_math.grading import grade_answer
from gym_env_math.problems import FAMILIES, draw_problems, home
from gym_env_math.rows import MathConfig, MathTask
from gymsdk.graders.maths import grade
from gymsdk.graders.maths.extraction import find_answer


def draw(split: str, count: int, seed: int = 0, **settings: object) -> list[MathTask]:
    return list(itertools.islice(gymsdk.load("math", **settings).tasks(split, seed=seed), count))


def of_family(family: str, count: int) -> list[MathTask]:
    return draw("train", count, families=[family])


def test_the_same_seed_draws_the_same_rows():
    assert draw("train", 50, seed=3) == draw("train", 50, seed=3)
    assert draw("train", 50, seed=3) != draw("train", 50, seed=4)


@pytest.mark.slow
def test_finite_splits_have_their_size_and_no_repeated_question():
    for seed, (split, size) in itertools.product(range(3), (("validation", 500), ("example", 11))):
        assert len({task.question for task in draw(split, 1000, seed)}) == size


def test_a_question_belongs_to_one_split_for_all_seeds():
    for split in ("train", "validation", "example"):
        assert {home(task.question) for seed in range(3) for task in draw(split, 100, seed)} == {split}


def test_every_family_and_difficulty_occurs_by_default():
    seen = Counter((task.family, task.difficulty) for task in draw("train", 2000))
    assert seen.keys() == set(itertools.product(FAMILIES, range(1, 6)))


def test_the_config_chooses_families_and_difficulties():
    tasks = draw("validation", 500, families="sets, intervals", min_difficulty=2, max_difficulty=3)
    assert {(task.family, task.difficulty) for task in tasks} == set(itertools.product(("sets", "intervals"), (2, 3)))


def test_a_narrow_selection_still_fills_its_split():
    assert len(draw("validation", 1000, families="fractions", max_difficulty=1)) == 500


@pytest.mark.parametrize(
    "settings",
    [{"families": []}, {"families": "algebra"}, {"min_difficulty": 0}, {"min_difficulty": 4, "max_difficulty": 2}],
)
def test_invalid_settings_are_rejected(settings: dict[str, object]):
    with pytest.raises(ValidationError):
        MathConfig.model_validate(settings)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_expected_answer_and_its_other_forms_are_graded_as_right(library: ProcessPoolExecutor, family: str):
    tasks = of_family(family, 15)
    pairs = [(t.expected_answer, f"\\boxed{{{form}}}") for t in tasks for form in (t.expected_answer, *t.other_answers)]
    grades = library.submit(grade_all, pairs).result()
    assert [pair for pair, grade in zip(pairs, grades, strict=True) if grade is None or grade.reward != 1] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_prompt_is_read_as_the_box_of_the_instruction(family: str):
    found = [find_answer(task.input[0]["content"]) for task in of_family(family, 300)]
    assert {answer.text for answer in found if answer is not None} == {"answer"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_prompt_earns_nothing(family: str):
    for task in of_family(family, 100):
        assert grade(task.expected_answer, task.input[0]["content"]).outcome == "different"


@pytest.mark.parametrize("family", FAMILIES)
async def test_a_formula_of_the_question_earns_nothing(family: str):
    for task in of_family(family, 60):
        for formula in re.findall(r"\\\((.+?)\\\)", task.question):
            for reply in (formula, f"\\boxed{{{formula}}}", f"The answer is ${formula}$."):
                assert (await grade_answer(task, reply, MathConfig())).reward == 0.0, (task.question, reply)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_prompt_earns_nothing_with_math_verify(library: ProcessPoolExecutor, family: str):
    pairs = [(task.expected_answer, task.input[0]["content"]) for task in of_family(family, 10)]
    assert {found.reward for found in library.submit(grade_all, pairs).result() if found} == {0.0}


def test_no_answer_is_a_small_integer():
    answers = [task.expected_answer for task in draw("train", 2000)]
    assert [answer for answer in answers if answer.lstrip("-").isdigit() and abs(int(answer)) <= 12] == []


def test_generating_rows_is_fast():
    rows = draw_problems("train", 0, FAMILIES, range(1, 6))
    assert len(list(itertools.islice(rows, 3000))) == 3000


def test_generating_rows_does_not_change_the_global_random_state():
    random.seed(1)
    before = random.getstate()
    draw("train", 20)
    assert random.getstate() == before
