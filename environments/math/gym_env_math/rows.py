"""The rows of the environment: what a task says, and the tasks made of problems."""

from __future__ import annotations

from gymsdk import Task

from .answers import bare
from .problems import Drawn
from .shortcut import INTEGER

INSTRUCTION = "Reason as long as you need, then end with the answer, and nothing else, in the form \\boxed{answer}."
LUCK = 0.02


class MathTask(Task):
    """A problem and the answer expected; *other_answers* are right as well, written differently."""

    question: str = ""
    expected_answer: str
    family: str | None = None
    difficulty: int | None = None
    other_answers: tuple[str, ...] = ()


def task_of(drawn: Drawn) -> MathTask:
    """The task that asks a drawn problem."""
    # The box of the instruction comes last and holds a word, so that repeating the prompt answers nothing.
    return MathTask.ask(
        f"{drawn.problem.question}\n\n{INSTRUCTION}",
        question=drawn.problem.question,
        expected_answer=drawn.problem.answer,
        family=drawn.family,
        difficulty=drawn.difficulty,
        other_answers=drawn.problem.variants,
    )


def question_of(task: MathTask) -> str:
    """The question itself, or the whole prompt where the row does not give it by itself."""
    return task.question or "\n".join(str(item.get("content", "")) for item in task.input)


def chance(task: MathTask) -> float:
    """What a guess earns at most: a whole number can be hit by luck."""
    return LUCK if INTEGER.fullmatch(bare(task.expected_answer)) else 0.0
