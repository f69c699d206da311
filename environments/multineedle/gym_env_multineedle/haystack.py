"""Tasks: a shuffled list of terms with synonyms, a question about one of its terms, and the synonyms' values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import count, islice, product
from random import Random
from typing import Literal, Self, TypeAlias

from pydantic import Field, model_validator

from gymsdk import Config, Task

QUALIFIERS = (
    "Rather",
    "Truly",
    "Quite",
    "Utterly",
    "Remarkably",
    "Thoroughly",
    "Unusually",
    "Plainly",
    "Decidedly",
    "Noticeably",
    "Undeniably",
    "Strikingly",
)
_ONSETS = (*"BDFGHJKLMNPRSTVWYZ", "Bl", "Br", "Cl", "Cr", "Dr", "Fl", "Gl", "Gr", "Pl", "Pr", "Sk", "Sn", "Tr")
_OPENINGS = tuple(map("".join, product(_ONSETS, "aeiou", "bdgklmnprtvz")))
# No English word has these endings, so no question is about a made-up term.
_ENDINGS = tuple(map("".join, product("aeiou", "dlmnrstv", ("ov", "esk", "ulm", "ash", "orn"))))
MADE_UP_WORDS = len(_OPENINGS) * len(_ENDINGS)
"""The number of different made-up words."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A term, its synonyms, and questions that describe the term without naming it."""

    term: str
    synonyms: tuple[str, ...]
    questions: tuple[str, ...]

    def names(self, number: int) -> list[str]:
        """Return synonyms to draw *number* from: the plain synonyms, and qualified ones if there are too few."""
        plain = list(self.synonyms)
        if number <= len(plain):
            return plain
        return plain + [f"{qualifier} {synonym.lower()}" for qualifier in QUALIFIERS for synonym in plain]


@cache
def load_entries() -> tuple[Entry, ...]:
    """Return the terms of the package. No two terms have a similar meaning."""
    text = files(__package__).joinpath("words.txt").read_text(encoding="utf-8")
    return tuple(map(_parse_entry, text.splitlines()))


def _parse_entry(line: str) -> Entry:
    term, synonyms, *questions = line.split(" | ")
    return Entry(term.capitalize(), tuple(map(str.capitalize, synonyms.split(", "))), tuple(questions))


def iter_made_up_words(rng: Random) -> Iterator[str]:
    """Yield made-up words in an order that *rng* chooses. No word repeats within `MADE_UP_WORDS` words."""
    start, step = rng.randrange(MADE_UP_WORDS), rng.randrange(MADE_UP_WORDS)
    while math.gcd(step, MADE_UP_WORDS) > 1:
        step += 1
    for number in count(start, step):
        opening, ending = divmod(number % MADE_UP_WORDS, len(_ENDINGS))
        yield _OPENINGS[opening] + _ENDINGS[ending]


def compute_value(word: str) -> int:
    """Return the value of a synonym: the sum of its code points."""
    return sum(map(ord, word))


@dataclass(frozen=True, slots=True)
class Haystack:
    """The *lines* of the list, and the synonyms to find in the order of their lines."""

    lines: list[str]
    needles: list[str]


def build_haystack(rng: Random, entry: Entry, *, distractors: int, sizes: Sequence[int]) -> Haystack:
    """Build a list about one term and many others.

    The number of synonyms varies for every term in the same way, so it does not reveal which term to find.

    Args:
        rng: The source of randomness.
        entry: The term to find.
        distractors: The number of lines about other terms.
        sizes: The possible numbers of synonyms of a term.

    Returns:
        The lines, and the synonyms of *entry* in the order of their lines.
    """
    needles = _draw_synonyms(rng, entry, rng.choice(sizes))
    lines = list(islice(_iter_distractors(rng, entry, sizes), distractors))
    rng.shuffle(lines)
    # Insert from the last position to the first, so that an insertion does not shift the remaining positions.
    places = sorted(rng.choices(range(len(lines) + 1), k=len(needles)), reverse=True)
    for place, needle in zip(places, reversed(needles), strict=True):
        lines.insert(place, _format_line(entry.term, needle))
    return Haystack(lines, needles)


def _draw_synonyms(rng: Random, entry: Entry, number: int) -> list[str]:
    """Draw synonyms of *entry* with values that differ from each other and from the value of the term."""
    taken = {compute_value(entry.term)}
    names = entry.names(number)
    found = []
    for name in rng.sample(names, len(names)):
        if compute_value(name) not in taken:
            taken.add(compute_value(name))
            found.append(name)
    return found[:number]


def _iter_distractors(rng: Random, entry: Entry, sizes: Sequence[int]) -> Iterator[str]:
    others = [other for other in load_entries() if other is not entry]
    for other in rng.sample(others, len(others)):
        number = rng.choice(sizes)
        yield from (_format_line(other.term, synonym) for synonym in rng.sample(other.names(number), number))
    words = iter_made_up_words(rng)
    for term in words:
        yield from [_format_line(term, synonym) for synonym in islice(words, rng.choice(sizes))]


def _format_line(term: str, synonym: str) -> str:
    return f"The term '{term}' has a synonym '{synonym}'."


INSTRUCTIONS = """\
Below is a long list. Each of its lines gives one synonym of one term. The user's message has to do with exactly \
one of those terms: it names the term, or describes it in other words.

# What to do
1. Find out which term of the list the message has to do with. Do not answer the message itself.
2. Find every line of the list that is about this term. The lines are scattered; leave none out.
3. Call `get_synonym_value` for each synonym in these lines, to learn its value.
4. Call `extract_synonym_values` once, with all these values, in the order in which their lines stand in the list.
5. Finish with one short sentence.

The term itself is no synonym: never look up or extract a value for it. Lines about other terms do not count, \
however near their meaning.

# For instance
Suppose the message is "I lost my voice at the concert and can only croak", and the list has a term 'Hoarse' with \
the synonym 'Raspy' in one line and, further down, 'Husky' in another. Should their values be 17 and 4, then \
`extract_synonym_values` gets [17, 4].

# The list
"""

NAMING_QUESTIONS = (
    "When is it fair to call something {term}?",
    "Tell me a story in which everything is {term}.",
    "How would you explain the word {term} to a child?",
    "I keep writing {term} in my diary; what else could I say?",
    "What comes to your mind when somebody says {term}?",
    "Which people, places or things would you describe as {term}?",
    "Make up a riddle whose answer is the word {term}.",
    "Is it a good thing or a bad thing to be {term}?",
)
"""Questions that name the term."""


def build_instructions(lines: Iterable[str]) -> str:
    """Return the system message: the instructions followed by the *lines* of the list."""
    return INSTRUCTIONS + "\n".join(lines)


def draw_question(rng: Random, entry: Entry) -> str:
    """Return a user message about *entry*. Half of the messages name the term; the others describe it."""
    if rng.random() < 0.5:  # noqa: PLR2004  # an even chance
        return rng.choice(NAMING_QUESTIONS).format(term=entry.term.lower())
    return rng.choice(entry.questions)


Split: TypeAlias = Literal["train", "validation", "example"]
"""`train` is endless; `SIZES` holds the number of tasks of the other splits."""

SIZES = {"validation": 200, "example": 5}


class SynonymConfig(Config):
    """The settings: the size of a generated haystack and the number of synonyms to extract."""

    distractors: int = Field(default=300, ge=10, le=50_000, description="lines about other terms")
    needles: int = Field(default=3, ge=1, le=40, description="synonyms to extract, give or take the spread")
    spread: int = Field(default=1, ge=0, description="by how much the number of synonyms varies from task to task")

    @model_validator(mode="after")
    def _check_spread(self) -> Self:
        if self.spread >= self.needles:
            raise ValueError(f"`spread` must be smaller than `needles`, which is {self.needles}")
        return self

    @property
    def sizes(self) -> range:
        """The possible numbers of synonyms of a term in the list."""
        return range(self.needles - self.spread, self.needles + self.spread + 1)


class SynonymTask(Task):
    """A row of the environment.

    It holds the synonyms to extract with their values, in the order of the list, and the term itself
    (the minefield label), which the policy must not extract.
    """

    id: int | None = None
    expected_synonyms: list[str] = Field(min_length=1)
    expected_synonym_values: list[int] = Field(min_length=1)
    minefield_label: str
    minefield_label_value: int


def generate_tasks(split: Split, seed: int, config: SynonymConfig) -> Iterator[SynonymTask]:
    """Generate the tasks of a split.

    Args:
        split: The split to generate.
        seed: The same split, seed and settings generate the same tasks.
        config: The settings of the environment.

    Returns:
        An iterator over the tasks. It is endless for `train`.
    """
    numbers: Iterable[int] = range(SIZES[split]) if split in SIZES else count()
    return (_build_task(number, Random(f"{split}:{seed}:{number}"), config) for number in numbers)


def _build_task(number: int, rng: Random, config: SynonymConfig) -> SynonymTask:
    entry = rng.choice(load_entries())
    built = build_haystack(rng, entry, distractors=config.distractors, sizes=config.sizes)
    messages = [
        {"role": "system", "content": build_instructions(built.lines)},
        {"role": "user", "content": draw_question(rng, entry)},
    ]
    return SynonymTask(
        responses_create_params={"input": messages, "parallel_tool_calls": False},
        id=number,
        expected_synonyms=built.needles,
        expected_synonym_values=[compute_value(needle) for needle in built.needles],
        minefield_label=entry.term,
        minefield_label_value=compute_value(entry.term),
    )
