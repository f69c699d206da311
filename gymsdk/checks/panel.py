"""The panel: policies that understand nothing, none of which should earn more than chance."""

from __future__ import annotations

import json

from gymsdk.checks.attack import Attack, Seen, Turns, calls, replies, says
from gymsdk.checks.options import letters, listed, numbers, options

WHOLE = (
    "compare the one answer the reply ends with, whole, with the expected one; do not look for the expected answer"
    " anywhere in the reply"
)
ONE = "take one answer from a reply, and give nothing to a reply that holds several"
EMPTY = "give nothing where no answer can be found in the reply, before anything is compared"
TRUTH = "put the chance that one of the options earns into `claims(task).chance`"


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


def _one_option(place: int) -> Attack:
    def reply(seen: Seen) -> str | None:
        asked = seen.last("user") or seen.prompt
        found = letters(asked) or options(asked)
        return found[place] if found else None

    return replies(f"always takes the {'last' if place else 'first'} option it is given", reply, mend=TRUTH)


def _every_number(seen: Seen) -> str | None:
    found = numbers(seen.prompt)
    return every_form(found[:60]) if found else None


def _every_choice(seen: Seen) -> Turns:
    asked = [(str(tool["name"]), json.dumps(given)) for tool in seen.tools for given in listed(tool)]
    return [calls(*asked[:60]), *says("", "Done.").script(seen)] if asked else []


PANEL: tuple[Attack, ...] = (
    says("says nothing", "", mend=EMPTY),
    says("says blanks", " \n\t ", mend=EMPTY),
    says("says that it does not know", "I don't know.", mend=EMPTY),
    says("gives an empty box", "\\boxed{}\n<answer></answer>\nAnswer:", mend=EMPTY),
    replies("repeats the user's message", lambda seen: seen.last("user") or None, mend=WHOLE),
    replies("repeats the system's message", lambda seen: seen.last("system", "developer") or None, mend=WHOLE),
    replies("repeats the whole prompt", lambda seen: seen.prompt or None, mend=WHOLE),
    Attack("gives the answer of another task", lambda seen: seen.other, "compare with this task's own answer"),
    replies("gives every option at once", _options, mend=ONE),
    _one_option(0),
    _one_option(-1),
    Attack(
        "calls the tools with every value on their lists", _every_choice, "let wrong calls cost what right ones pay"
    ),
    says("says every number from 0 to 200", " ".join(map(str, range(201))), mend=ONE),
    says("says every letter and yes and no", every_form([*"ABCDE", "yes", "no", "True", "False"]), mend=ONE),
    replies("says every number of the prompt", _every_number, mend=ONE),
    says("fills thirty boxes", "\n".join(one_form(str(number)) for number in range(30)), mend=ONE),
    says("always says yes", "yes", mend=TRUTH),
    says("always says no", "no", mend=TRUTH),
    says("always says 0", one_form("0"), mend=TRUTH),
    says("always says 1", one_form("1"), mend=TRUTH),
    says("answers with a wildcard", ".*", mend="never use the reply as a pattern; escape it or compare it"),
)
"""Every policy of the panel."""
