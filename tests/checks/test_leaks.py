"""Answers that a policy can see."""

from __future__ import annotations

import pytest

from gymsdk import Task, responses
from gymsdk.checks import clues
from gymsdk.checks.leaks import contains_words, drop_shared_secrets, is_one_of_many, list_secrets

ADDITIONS = """
from base64 import b64encode

@hookimpl
def tasks(split: Literal["train", "test"], seed: int):
    rng = random.Random(f"{split}:{seed}")
    for number in range(9):
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        total = one + other
        yield Task.ask(PROMPT, total=total)

@hookimpl
def solve(task):
    return Message(content=str(task.total))

@hookimpl
def verify(task, transcript):
    return Verdict(reward=float(transcript.reply.strip() == str(task.total)))
"""
CHECK = "semantic.no_solution_leakage"


@pytest.mark.parametrize(
    "prompt",
    [
        'f"{one} + {other}? Correct answer: {total}."',
        'f\'{one} + {other}? {{"expected_answer": "{total}"}}\'',
        'f"<!-- {total} -->{one} + {other}?"',
        'f"{one} + {other} = \\\\boxed{{{total}}}?"',
        'f"{one} + {other} ({total})?"',
        'f"{one} + {other}? {b64encode(str(total).encode()).decode()}"',
        'f"{one} + {other}?\\n{total}"',
        'f"{one} + {other}? [ref {str(total)[::-1]}]"',
        'f"{one} + {other}? {str(total).encode().hex()}"',
        'f"{one} + {other}?q=" + "".join(f"%{ord(sign):x}" for sign in str(total))',
    ],
)
async def test_an_answer_in_the_prompt_is_found(subject, outcome, prompt):
    assert (await outcome(CHECK, subject(ADDITIONS.replace("PROMPT", prompt)))).status == "failed"


async def test_neither_a_prompt_without_the_answer_nor_rewards_for_any_reply_are_leaks(subject, outcome):
    sound = ADDITIONS.replace("PROMPT", 'f"{one} + {other}?"')
    for source in (sound, sound.replace("reply.strip() == str(task.total)", "reply > ''")):
        assert (await outcome(CHECK, subject(source))).findings == []


@pytest.mark.parametrize(
    ("rule", "text", "found"),
    [
        (clues.find_after_words, "The answer is 42.", "42"),
        (clues.find_after_words, "expected_value = 42", "42"),
        (clues.find_in_fields, '{"gold": 42, "b": 1}', "42"),
        (clues.find_in_fields, '{"gold_answer": "x y"}', "x y"),
        (clues.find_in_boxes, r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (clues.find_in_rot13, "(ref uryyb)", "hello"),
        (clues.find_expressions, "Compute: 714 * 139 + 763.", "714 * 139 + 763"),
    ],
)
def test_a_clue_is_found(rule, text, found):
    assert found in rule(text)


def test_decoding_that_the_task_asks_for_is_not_a_leak():
    found = {rule.name for rule in clues.RULES if rule.is_asked_for("Decode this: (uryyb)")}
    assert {"decodes ROT13", "reads backwards", "decodes hexadecimal"} <= found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("no city called 'a'; there are Nairobi, Oslo, Prague and Rome", True),
        ('{"error": "the answer is Nairobi", "code": 7, "more": "none"}', False),
        ("say Nairobi", False),
        ("say Nairobi, Bruno", False),
    ],
)
def test_a_listed_alternative_is_not_a_leak(text, found):
    assert is_one_of_many("Nairobi", text, {"Nairobi", "Bruno"}) is found


def test_secrets_come_from_the_oracle_and_the_row():
    task = Task.ask("Which of red1 and blue2?", expected={"colour": "red1", "code": "XK77"}, note="unrelated")
    solution = [
        [responses.build_function_call("take", {"code": 1234})],
        [responses.build_message("Done.\nAnswer: green3")],
    ]
    assert list_secrets(task, solution, "Which of red1 and blue2?") == {
        "XK77",
        "1234",
        "green3",
        "Done.\nAnswer: green3",
    }
    # Text that many tasks share is no secret, and a secret matches whole words only.
    assert drop_shared_secrets([{"Done.", "one1"}, {"Done.", "two2"}, {"Done."}]) == [{"one1"}, {"two2"}, set()]
    assert [contains_words("42x", text) for text in ("the 42x.", "142x", "42xy", "42X")] == [True, False, False, True]
