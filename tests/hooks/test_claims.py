"""What `claims` is given, what it may answer, what becomes of an answer that is wrong."""

from __future__ import annotations

from gymsdk import Claims, Environment, hookimpl

from .told import Judge, Question


async def test_claims_are_the_environments_own(task):
    class Claiming(Judge):
        @hookimpl
        def claims(self, task: Question):
            return Claims(maximum=2.0, variants=[str(task.answer)])

    environment = Environment("claiming", Claiming())
    assert await environment.claims(environment.read(task)) == Claims(maximum=2.0, variants=["42"])
