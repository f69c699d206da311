"""Tests of generated tasks: the needles, their positions, and the vocabulary."""

from __future__ import annotations

import re
import time
from itertools import islice, pairwise
from random import Random
from typing import Any

import pytest

import gymsdk
from gym_env_multineedle.haystack import MADE_UP_WORDS, compute_value, iter_made_up_words, load_entries
from gymsdk import Task

LINE = re.compile(r"^The term '(.+?)' has a synonym '(.+)'\.$", re.MULTILINE)


def generate_tasks(split: str, number: int, *, seed: int = 0, **settings: Any) -> list[Task]:
    return list(islice(gymsdk.load("multineedle", **settings).tasks(split, seed=seed), number))


def pairs(task: Task) -> list[tuple[str, str]]:
    return LINE.findall(str(task.input[0]["content"]))


@pytest.mark.parametrize(("split", "length"), [("validation", 200), ("example", 5)])
def test_finite_splits_have_their_size(split, length):
    assert len(generate_tasks(split, 1_000)) == length


def test_train_is_longer_than_the_other_splits():
    assert len(generate_tasks("train", 300)) == 300


def test_a_row_has_the_published_fields():
    (task,) = generate_tasks("train", 1)
    row = task.row()
    assert row.keys() == {
        "responses_create_params",
        "id",
        "expected_synonyms",
        "expected_synonym_values",
        "minefield_label",
        "minefield_label_value",
    }
    assert row["id"] == 0
    assert row["responses_create_params"]["parallel_tool_calls"] is False
    assert [message["role"] for message in row["responses_create_params"]["input"]] == ["system", "user"]


@pytest.mark.parametrize("settings", [{}, {"needles": 1, "spread": 0}, {"needles": 12, "spread": 6, "distractors": 99}])
def test_the_expected_synonyms_are_the_lines_of_the_term_in_order(settings):
    for task in generate_tasks("train", 40, **settings):
        row = task.row()
        term = row["minefield_label"]
        assert row["expected_synonyms"] == [synonym for other, synonym in pairs(task) if other == term]
        assert row["expected_synonym_values"] == [sum(map(ord, synonym)) for synonym in row["expected_synonyms"]]
        assert row["minefield_label_value"] == sum(map(ord, term))
        assert len({*row["expected_synonym_values"], row["minefield_label_value"]}) == len(row["expected_synonyms"]) + 1


@pytest.mark.parametrize("settings", [{"distractors": 10}, {"distractors": 1_234, "needles": 5, "spread": 2}])
def test_the_list_has_the_configured_length(settings):
    needles, spread = settings.get("needles", 3), settings.get("spread", 1)
    for task in generate_tasks("train", 10, **settings):
        found = len(task.row()["expected_synonyms"])
        assert len(pairs(task)) == settings["distractors"] + found
        assert needles - spread <= found <= needles + spread


def test_no_line_repeats_in_a_haystack_of_any_size():
    (task,) = generate_tasks("train", 1, distractors=50_000)
    lines = pairs(task)
    assert len(set(lines)) == len(lines)


def test_the_number_of_lines_does_not_reveal_the_term():
    (task,) = generate_tasks("train", 1, distractors=5_000, needles=3, spread=1)
    terms = [term for term, _ in pairs(task)]
    counts = {term: terms.count(term) for term in set(terms[:500])}
    assert sorted(counts.values())[len(counts) // 2] <= 4


def test_the_lines_of_every_term_are_scattered():
    (task,) = generate_tasks("train", 1, distractors=1_000)
    terms = [term for term, _ in pairs(task)]
    assert sum(one == next_one for one, next_one in pairwise(terms)) < 30


def test_needles_occur_at_all_positions_in_the_list():
    places = []
    for task in generate_tasks("train", 150):
        lines, term = pairs(task), task.row()["minefield_label"]
        places += [place / len(lines) for place, (other, _) in enumerate(lines) if other == term]
    assert min(places) < 0.05
    assert max(places) > 0.95
    assert sum(places) / len(places) == pytest.approx(0.5, abs=0.06)


def test_questions_name_the_term_about_as_often_as_they_describe_it():
    tasks = generate_tasks("train", 200)
    named = sum(
        bool(re.search(rf"\b{task.row()['minefield_label'].lower()}\b", str(task.input[1]["content"])))
        for task in tasks
    )
    assert 60 < named < 140


def test_the_same_seed_and_settings_give_the_same_rows():
    assert generate_tasks("train", 5, seed=3) == generate_tasks("train", 5, seed=3)
    assert generate_tasks("train", 5, seed=3) != generate_tasks("train", 5, seed=4)
    assert generate_tasks("train", 5, distractors=20) != generate_tasks("train", 5, distractors=21)


def test_splits_share_no_row():
    prompts = {
        split: {str(task.input[0]["content"]) for task in generate_tasks(split, 200, distractors=10)}
        for split in ("train", "validation", "example")
    }
    assert not prompts["train"] & prompts["validation"]
    assert not prompts["example"] & (prompts["train"] | prompts["validation"])


def test_building_a_hundred_thousand_tokens_takes_at_most_fifty_milliseconds_of_cpu():
    tasks = gymsdk.load("multineedle", distractors=10_000).tasks("train", seed=1)
    spent = []
    for _ in range(5):
        started = time.process_time()
        task = next(tasks)
        spent.append(time.process_time() - started)
    assert min(spent) < 0.05
    # Count words and punctuation marks. A tokenizer splits made-up words further and rarely joins words.
    assert len(re.findall(r"\w+|[^\w\s]", str(task.input[0]["content"]))) > 110_000


@pytest.mark.parametrize(
    "settings",
    [{"distractors": 0}, {"distractors": 60_000}, {"needles": 0}, {"needles": 2, "spread": 2}, {"needle": 3}],
)
def test_invalid_settings_are_rejected(settings):
    with pytest.raises(gymsdk.UsageError):
        gymsdk.load("multineedle", **settings)


def test_no_two_terms_share_a_synonym_and_no_term_is_a_synonym():
    words = [synonym for entry in load_entries() for synonym in entry.synonyms]
    assert len(words) == len(set(words))
    assert not {entry.term for entry in load_entries()} & set(words)


def test_descriptions_do_not_contain_any_term():
    terms = {entry.term.lower() for entry in load_entries()}
    for entry in load_entries():
        for question in entry.questions:
            assert not terms & set(re.findall(r"[a-z-]+", question.lower())), question


def test_every_term_has_synonyms_for_the_largest_setting():
    for entry in load_entries():
        values = {compute_value(name) for name in entry.names(79)} - {compute_value(entry.term)}
        assert len(values) >= 79


def test_made_up_words_do_not_repeat():
    found = list(islice(iter_made_up_words(Random(5)), MADE_UP_WORDS))
    assert len(set(found)) == MADE_UP_WORDS > 100_000
    assert not set(found) & {word for entry in load_entries() for word in (entry.term, *entry.synonyms)}
