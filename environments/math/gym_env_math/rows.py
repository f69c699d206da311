"""The rows of the environment, and their construction from problems."""

from __future__ import annotations

from gymsdk import Task

from .answers import bare
from .problems import Drawn
from .shortcut import INTEGER

INSTRUCTION = "Reason as long as you need, then end with the answer, and nothing else, in the form \\boxed{answer}."
LUCK = 0.02


class MathTask(Task):
    """A problem and its expected answer. *other_answers* are other correct ways to write this answer."""

    question: str = ""
    expected_answer: str
    family: str | None = None
    difficulty: int | None = None
    other_answers: tuple[str, ...] = ()


def task_of(drawn: Drawn) -> MathTask:
    """Build a task from a drawn problem."""
    # The last box of the prompt holds a word, so a policy that repeats the prompt earns nothing.
    return MathTask.ask(
        f"{drawn.problem.question}\n\n{INSTRUCTION}",
        question=drawn.problem.question,
        expected_answer=drawn.problem.answer,
        family=drawn.family,
        difficulty=drawn.difficulty,
        other_answers=drawn.problem.variants,
    )


def question_of(task: MathTask) -> str:
    """Return the question, or the whole prompt if the row has no `question` field."""
    return task.question or "\n".join(str(item.get("content", "")) for item in task.input)


def chance(task: MathTask) -> float:
    """Return the highest expected reward of a guess. Only an integer can be guessed."""
    return LUCK if INTEGER.fullmatch(bare(task.expected_answer)) else 0.0
