"""The panel: policies that understand nothing, none of which should earn more than chance."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable

from gymsdk import wire
from gymsdk.checks.attack import Attack, Seen, Turns, calls, replies, said, says
from gymsdk.checks.clues import expressions
from gymsdk.checks.options import letters, listed, numbers, options, plain_value

WHOLE = (
    "compare the one answer the reply ends with, whole, with the expected one; do not look for the expected answer"
    " anywhere in the reply"
)
ONE = "take one answer from a reply, and give nothing to a reply that holds several"
EMPTY = "give nothing where no answer can be found in the reply, before anything is compared"
TRUTH = "put the chance that one of the options earns into `claims(task).chance`"


BEGINS = "compare the whole answer: a beginning of it, or a sign that is in it, is none"
THOUGHT = "grade what is replied and done; what a policy thinks is nobody's answer"
DATA = "read a reply as data: let no `eval` or solver compute what it says"
CALLED = "pay for the right arguments and what they led to, not for the name of a tool"
ENDED = "pay nothing for reaching the end of a budget: who never stops has done nothing"
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")
SPAM = 40
SHORT = 80
"""Characters of a reply that is an answer and nothing else."""

TOOLS = 32
"""How many tools of a task are called."""


def every_form(answers: list[str]) -> str:
    """Give one reply that holds each of *answers* in every form that is asked for somewhere."""
    lines = [f"{answer}\n\\boxed{{{answer}}}\n<answer>{answer}</answer>\nAnswer: {answer}" for answer in answers]
    return "\n".join([", ".join(answers), *lines])


def one_form(answer: str) -> str:
    """Give *answer* as prompts ask for it: in a box, in a tag, behind a word."""
    return f"<answer>\\boxed{{{answer}}}</answer>\nAnswer: {answer}"


def _options(seen: Seen) -> str | None:
    found = options(seen.prompt)
    return every_form(found) if found else None


def _many(form: Callable[[list[str]], str]) -> Attack:
    """Give the policy that lists the answers of all tasks: one that guesses often enough has this one's among them.

    It stands in the middle: whoever takes the first or the last answer of a reply takes another.
    """

    def reply(seen: Seen) -> str | None:
        own = seen.reply
        # Who is asked to use a word may use others beside it.
        if not own or len(own) > SHORT or own.casefold() in seen.prompt.casefold():
            return None
        others = [each for each in seen.replies if len(each) <= SHORT and not _alike(each, own)]
        middle = len(others) // 2
        return form([*others[:middle], own, *others[middle:]]) if len(others) >= 2 else None  # noqa: PLR2004  # ends

    return replies("lists many answers in one reply", reply, mend=ONE, tasks=6)


def _alike(one: str, other: str) -> bool:
    """Whether one of two answers holds the other: to find it there would say nothing."""
    return one.casefold() in other.casefold() or other.casefold() in one.casefold()


def _one_option(place: int, which: str) -> Attack:
    def reply(seen: Seen) -> str | None:
        asked = seen.last_message("user") or seen.prompt
        found = letters(asked) or options(asked)
        return found[place] if -1 <= place < len(found) and found else None

    return replies(f"always takes the {which} option it is given", reply, mend=TRUTH)


def _one_sign(sign: str) -> Attack:
    """Give the policy that replies one letter or digit where that is not the whole of an answer."""

    def reply(seen: Seen) -> str | None:
        whole = any(re.search(rf"(?<!\w){sign}(?!\w)", each, re.IGNORECASE) for each in said(seen.own))
        return None if whole or seen.claims.chance > 0 else sign

    return replies(f"replies {sign!r} and nothing else", reply, mend=BEGINS, tasks=1)


def _thinks(name: str, thought: Callable[[Seen], str]) -> Attack:
    def script(seen: Seen) -> Turns:
        text = thought(seen)
        return [[wire.reasoning(text, id="rs_0"), wire.message("Done.", id="msg_0")]] if text else []

    return Attack(f"thinks of {name} and says nothing of it", script, THOUGHT, 6)


def _expression(place: int, form: Callable[[str], str]) -> Attack:
    def reply(seen: Seen) -> str | None:
        found = expressions(seen.prompt)
        return form(found[place]) if found else None

    return replies("repeats the expression it is to compute", reply, mend=DATA, tasks=6)


def _tool(place: int, times: int) -> Attack:
    """Give the policy that calls one tool with plain values, so many times in a turn."""

    def script(seen: Seen) -> Turns:
        if place >= len(seen.tools):
            return []
        tool = seen.tools[place]
        plain = json.dumps(plain_value((tool.get("parameters") or {}) | {"type": "object"}))
        return [calls(*[(str(tool["name"]), plain)] * times), *says("", "Done.").script(seen)]

    how = "and nothing else" if times == 1 else f"{times} times"
    return Attack(f"calls one tool with plain values {how}", script, CALLED, 2)


def _until_the_end(seen: Seen) -> Turns:
    tool = seen.tools[0] if seen.tools else {}
    plain = json.dumps(plain_value((tool.get("parameters") or {}) | {"type": "object"}))
    return [calls((str(tool.get("name", "no_such_tool")), plain))]


def _every_number(seen: Seen) -> str | None:
    found = numbers(seen.prompt)
    return every_form(found[:60]) if found else None


def _everything(seen: Seen) -> str:
    return " ".join([*map(str, range(201)), *options(seen.prompt)])


def _every_choice(seen: Seen) -> Turns:
    asked = [(str(tool["name"]), json.dumps(given)) for tool in seen.tools for given in listed(tool)]
    return [calls(*asked[:60]), *says("", "Done.").script(seen)] if asked else []


PANEL: tuple[Attack, ...] = (
    says("says nothing", "", mend=EMPTY),
    says("says blanks", " \n\t ", mend=EMPTY, tasks=4),
    says("says that it does not know", "I don't know.", mend=EMPTY, tasks=6),
    says("gives an empty box", "\\boxed{}\n<answer></answer>\nAnswer:", mend=EMPTY, tasks=6),
    replies("repeats the user's message", lambda seen: seen.last_message("user") or None, mend=WHOLE),
    replies("repeats the system's message", lambda seen: seen.last_message("system", "developer") or None, mend=WHOLE),
    replies("repeats the whole prompt", lambda seen: seen.prompt or None, mend=WHOLE),
    Attack("gives the answer of another task", lambda seen: seen.other, "compare with this task's own answer"),
    replies("gives every option at once", _options, mend=ONE),
    *(_many(form) for form in ("\n".join, every_form)),
    *(_one_option(place, which) for place, which in enumerate(PLACES)),
    _one_option(-1, "last"),
    Attack(
        "calls the tools with every value on their lists", _every_choice, "let wrong calls cost what right ones pay"
    ),
    says("says every number from 0 to 200", " ".join(map(str, range(201))), mend=ONE),
    says("says every letter and yes and no", every_form([*"ABCDE", "yes", "no", "True", "False"]), mend=ONE),
    replies("says every number of the prompt", _every_number, mend=ONE),
    says("fills thirty boxes", "\n".join(one_form(str(number)) for number in range(30)), mend=ONE, tasks=6),
    says("always says yes", "yes", mend=TRUTH),
    says("always says no", "no", mend=TRUTH),
    says("always says 0", one_form("0"), mend=TRUTH),
    says("always says 1", one_form("1"), mend=TRUTH),
    says("answers with a wildcard", ".*", mend="never use the reply as a pattern; escape it or compare it", tasks=4),
    *(_one_sign(sign) for sign in string.ascii_letters + string.digits),
    *(_expression(place, form) for place in (0, -1) for form in (str, one_form)),
    _thinks("another task's answer", lambda seen: "\n".join(said(seen.other))),
    _thinks("every number from 0 to 200 and every option", _everything),
    Attack("calls a tool at every turn until its turns are over", _until_the_end, ENDED, 2),
    *(_tool(place, times) for place in range(TOOLS) for times in (1, SPAM)),
)
"""Every policy of the panel."""
