"""Prompts: the instructions to the policy, and the user's questions."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from .words import Entry

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

NAMING = (
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


def instructions(lines: Iterable[str]) -> str:
    """Return the system message: the instructions followed by the *lines* of the list."""
    return INSTRUCTIONS + "\n".join(lines)


def question(rng: Random, entry: Entry) -> str:
    """Return a user message about *entry*. Half of the messages name the term; the others describe it."""
    if rng.random() < 0.5:  # noqa: PLR2004  # an even chance
        return rng.choice(NAMING).format(term=entry.term.lower())
    return rng.choice(entry.questions)
