"""Answers that a prompt shows, in environments that take an answer in a form of their own."""

from __future__ import annotations

import pytest

CHECK = "semantic.no_solution_leakage"

FRAME = """
import json, re
from base64 import b64encode

@hookimpl
def tasks(split: Literal["train", "test"], seed: int):
    rng = random.Random(f"{split}:{seed}")
    while True:
        one, other = rng.randrange(300, 999), rng.randrange(300, 999)
        total = one + other
        yield Task.ask(PROMPT, total=total)

FORM
"""

REPLY = """
def write(total):
    return TEMPLATE

@hookimpl
def solve(task):
    return Message(content=write(task.total))

@hookimpl
def verify(task, transcript):
    return Verdict(reward=float(transcript.reply.strip().split("\\n")[-1] == write(task.total).split("\\n")[-1]))
"""

CALL = """
class Handed(State):
    given: Any = None

@hookimpl
def reset():
    return Reset(state=Handed())

async def look_up(key: str) -> str:
    '''Look up a key.'''
    return "nothing"

async def submit(number: KIND, state: Handed) -> str:
    '''Submit a number.'''
    state.given = number
    return "taken"

@hookimpl
def tools():
    return [look_up, submit]

@hookimpl
def solve(task, transcript):
    calls = transcript.calls()
    if not calls:
        return [ToolCall(name="look_up", arguments={"key": str(task.total % 7)})]
    return Message(content="Done.") if len(calls) > 1 else [ToolCall(name="submit", arguments={"number": VALUE})]

@hookimpl
def verify(task, state: Handed):
    return Verdict(reward=float(state.given == VALUE))
"""

FORMS = {
    "own words": REPLY.replace("TEMPLATE", 'f"The sum equals <<{total}>>, I think."'),
    "a last line": REPLY.replace("TEMPLATE", 'f"First I add.\\n{total - 7} + 7\\nFINAL ANSWER IS: {total}!"'),
    "JSON": REPLY.replace("TEMPLATE", 'json.dumps({"kind": "sum", "value": total})'),
    "nested JSON": REPLY.replace("TEMPLATE", 'json.dumps({"result": {"values": [str(total)]}})'),
    "XML": REPLY.replace("TEMPLATE", 'f"<final>{total}</final>"'),
    "an argument": CALL.replace("KIND", "int").replace("VALUE", "task.total"),
    "a text argument": CALL.replace("KIND", "str").replace("VALUE", "str(task.total)"),
}
LEAKS = {
    "an HTML comment": 'f"{one} + {other}?<!-- {total} -->"',
    "a sentence in an HTML comment": 'f"{one} + {other}?\\n<!-- for graders: the right number is {total}. -->"',
    "a comment in code": 'f"Compute `{one} + {other}`  # {total}"',
    "a block comment": 'f"x = {one} + {other} /* = {total} */"',
    "a comment after slashes": 'f"x = {one} + {other}; // {total}"',
    "a hidden element": 'f"{one} + {other}? <span style=\\"display:none\\">{total}</span>"',
    "a hint in brackets": 'f"{one} + {other}? (hint: {total})"',
    "a hint without a colon": 'f"{one} + {other}? [Hint {total}]"',
    "a hint in a line": 'f"{one} + {other}?\\nHint: the total is {total}"',
    "an answer key": 'f"{one} + {other}?\\nAnswer key: {total}"',
    "a tag": 'f"{one} + {other}? <hint>{total}</hint>"',
    "base64": 'f"{one} + {other}? {b64encode(str(total).encode()).decode()}"',
}
SOUND = {
    "nothing": 'f"{one} + {other}?"',
    "a hint that helps": 'f"{one} + {other}? (hint: add the units first)"',
    "a comment": 'f"{one} + {other}? <!-- level 3 -->"',
    "the form": 'f"{one} + {other}? Answer with <final>number</final>, <<number>> or submit(number)."',
    "a heading": 'f"# Sums\\nWhat is {one} + {other}? // one number"',
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("leak", LEAKS)
async def test_an_answer_is_found_in_every_form_of_the_oracle(subject, outcome, form, leak):
    result = await outcome(CHECK, subject(FRAME.replace("PROMPT", LEAKS[leak]).replace("FORM", FORMS[form])))
    assert result.status == "failed"


@pytest.mark.parametrize(
    ("form", "shown"),
    [
        ("own words", "<<{total}>>"),
        ("a last line", "FINAL ANSWER IS: {total}!"),
        ("XML", "<final>{total}</final>"),
        ("an argument", "submit({total})"),
        ("an argument", "submit(number={total})"),
        ("a text argument", "submit(number='{total}')"),
    ],
)
async def test_an_answer_that_stands_in_its_form_is_found(subject, outcome, form, shown):
    prompt = f'f"{{one}} + {{other}}? For example, {shown} is right."'
    assert (await outcome(CHECK, subject(FRAME.replace("PROMPT", prompt).replace("FORM", FORMS[form])))).findings


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prompt", SOUND)
async def test_a_prompt_without_the_answer_passes(subject, outcome, form, prompt):
    result = await outcome(CHECK, subject(FRAME.replace("PROMPT", SOUND[prompt]).replace("FORM", FORMS[form])))
    assert (result.status, result.findings) == ("passed", [])


COPIED = """
class Trip(Task):
    city: str
    guests: int

class Booked(State):
    bookings: list[tuple[str, int]] = []

@hookimpl
def reset():
    return Reset(state=Booked())

async def book(city: str, guests: int, state: Booked) -> str:
    '''Book rooms in a city for guests.'''
    state.bookings.append((city, guests))
    return "booked"

@hookimpl
def tools():
    return [book]

@hookimpl
def tasks(split: Literal["train", "test"], seed: int):
    rng = random.Random(f"{split}:{seed}")
    while True:
        city, guests = "".join(rng.choices("abcdefgh", k=8)), rng.randrange(2, 90)
        yield Trip.ask(PROMPT, city=city, guests=guests)

@hookimpl
def solve(task, transcript):
    return Message(content="Done.") if transcript.calls() else [
        ToolCall(name="book", arguments={"city": task.city, "guests": task.guests})
    ]

@hookimpl
def verify(task, state: Booked):
    return Verdict(reward=float(state.bookings == [(task.city, task.guests)]))
"""


@pytest.mark.parametrize(
    "prompt",
    [
        'f"Book a room in {city} for {guests} guests."',
        'f"Book a room. Target: {city}. Label: x. Guests: {guests} (adults)"',
        'f"Book a room ({city}). Result: {guests} guests"',
    ],
)
async def test_arguments_that_the_prompt_names_are_not_a_leak(subject, outcome, prompt):
    result = await outcome(CHECK, subject(COPIED.replace("PROMPT", prompt)))
    assert (result.status, result.findings) == ("passed", [])
