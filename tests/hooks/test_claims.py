"""The `claims` hook: its arguments, its valid results, and the failures of invalid results."""

from __future__ import annotations

from gymsdk import Claims, Environment, hookimpl

from .environments import Judge, Question


async def test_claims_come_from_the_environment(task):
    class Claiming(Judge):
        @hookimpl
        def claims(self, task: Question):
            return Claims(maximum=2.0, variants=[str(task.answer)])

    environment = Environment("claiming", Claiming())
    assert await environment.claims(environment.read(task)) == Claims(maximum=2.0, variants=["42"])
