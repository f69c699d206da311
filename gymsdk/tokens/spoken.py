"""What a policy wrote in the Hermes form, taken apart: its thoughts, its text, its calls of tools.

One rule holds for calls. Between `<tool_call>` and its end every object with a name is a call, its arguments verbatim
whatever they are, so that the environment can say what is wrong with them; an object without a name stays text. A call
ends where its JSON ends, and where that cannot be read at the next tag of a call, or at the end of the text. Nothing is
raised, and nothing is lost but the scribble beside a named object within the tags of its call.

Thoughts stand between `<think>` and `</think>`, outside of calls. Without their end they go on to the end of the text,
if no words are before them; without their beginning, as a prompt may have it, they begin with the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from gymsdk import wire
from gymsdk.transcript import Item

from .objects import Written, objects, unquoted
from .stretches import Stretch, stretches

ARGUMENTS = ("arguments", "parameters")
"""What policies call the arguments."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the tool *name*, its *arguments* as they were written."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Spoken:
    """What a policy wrote, taken apart."""

    reasoning: list[str]
    text: str
    calls: list[Call]

    def build_items(self, *, turn: int) -> list[Item]:
        """Give the output items, thoughts, text, calls, with the ids that are those of the *turn*."""
        found = [wire.reasoning(*self.reasoning, id=f"rs_{turn}_0")] if self.reasoning else []
        if self.text.strip() or not (self.calls or self.reasoning):
            found.append(wire.message(self.text, id=f"msg_{turn}_{len(found)}"))
        return found + [
            wire.function_call(call.name, call.arguments, f"call_{turn}_{number}", id=f"fc_{turn}_{number}")
            for number, call in enumerate(self.calls, len(found))
        ]


def spoken(written: str, *, thinking: bool = False) -> Spoken:
    """Give what a policy wrote taken apart; *thinking* says that the prompt has opened its thoughts."""
    found = [*stretches(f"<think>{written}" if thinking else written)]
    thoughts = [thought for each in found if each.kind == "thought" and (thought := each.words.strip())]
    read = [_read(each) for each in found if each.kind != "thought"]
    calls = [call for each, _ in read for call in each]
    text = "".join(rest for _, rest in read)
    if calls:
        return Spoken(thoughts, text.strip(), calls)
    # A plain reply is kept to the letter; the blank after thoughts is no part of it.
    return Spoken(thoughts, text if text == written else text.lstrip(), calls)


def _read(stretch: Stretch) -> tuple[list[Call], str]:
    """The calls of a stretch, and what of it stays text."""
    if stretch.kind == "text":
        return [], stretch.words
    found = [(_named(each), each) for each in objects(stretch.words)]
    calls = [call for call, _ in found if call]
    if not calls:
        return [], stretch.source
    return calls, "\n".join(each.source for call, each in found if not call)


def _named(written: Written) -> Call | None:
    name = written.get_string("name")
    if not name:
        return None
    given = next((written.members[key] for key in ARGUMENTS if key in written.members), "{}")
    text = unquoted(given)
    return Call(name, given if text is None else text)
