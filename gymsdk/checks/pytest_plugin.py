"""The pytest plugin: `pytest --gymsdk NAME` makes a test of every check, and `gymsdk_check` checks inside a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

# pytest imports this module whenever it starts: everything of gymsdk is imported where it is needed.
if TYPE_CHECKING:
    from gymsdk.checks.check import Check, Report
    from gymsdk.checks.run import Run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names environments."""
    parser.getgroup("gymsdk").addoption(
        "--gymsdk",
        action="append",
        default=[],
        metavar="NAME",
        help="Check this installed environment, each check a test; may be given several times.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add a test for each check of each environment named, before `-k` and `-m` choose among the tests."""
    for name in dict.fromkeys(session.config.getoption("--gymsdk")):
        home = Checked.from_parent(session, name=f"gymsdk-{name}", run=_run(name))
        items.extend(session.genitems(home))


def _run(name: str) -> Run:
    """Give the run that the tests of environment *name* share; raises `pytest.UsageError` where there is none."""
    from gymsdk.checks import catalog
    from gymsdk.checks.run import Run
    from gymsdk.checks.subject import named
    from gymsdk.errors import GymsdkError

    try:
        catalog.ready(catalog.CHECKS)
        return Run(named(name, {}))
    except GymsdkError as error:
        raise pytest.UsageError(f"--gymsdk {name}: {error}") from None


class Checked(pytest.Collector):
    """One environment, whose checks are tests."""

    def __init__(self, *, run: Run, **given: Any) -> None:
        super().__init__(nodeid=given["name"], **given)
        self.run = run

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each check."""
        from gymsdk.checks.catalog import CHECKS

        for check in CHECKS:
            yield Looked.from_parent(self, name=check.id, check=check, run=self.run)


class Broken(Exception):
    """A check found something; the message is what people read."""


class Looked(pytest.Item):
    """One check as a test."""

    def __init__(self, *, check: Check, run: Run, **given: Any) -> None:
        super().__init__(**given)
        self.check = check
        self.run = run

    def runtest(self) -> None:
        """Run the check: it fails with what it found, and is skipped with its reason."""
        from gymsdk.checks.report import beneath
        from gymsdk.checks.run import waited_for

        result = waited_for(self.run.outcome(self.check))
        for warning in result.warnings:
            self.add_report_section("call", "gymsdk warnings", warning)
        if result.status == "skipped":
            pytest.skip(result.reason)
        if result.status == "failed":
            raise Broken("\n".join([result.asks, *beneath(result)]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Give what was found without a traceback, which would be the kit's."""
        if isinstance(excinfo.value, Broken):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Give where the test comes from: no file, a check of an environment."""
        return self.config.rootpath, None, f"{self.run.subject.name}: {self.check.id}"


@pytest.fixture
def gymsdk_check() -> Callable[..., Report]:
    """Check an installed environment: `gymsdk_check("name", only=[...], skip=[...], **settings)`.

    The test fails with what was found; where nothing was, the report is returned.
    """

    def check(name: str, /, *, only: Iterable[str] = (), skip: Iterable[str] = (), **settings: Any) -> Report:
        from gymsdk.checks import catalog
        from gymsdk.checks.report import text
        from gymsdk.checks.run import Run, waited_for
        from gymsdk.checks.subject import named

        chosen = catalog.chosen(only, skip)
        catalog.ready(chosen)
        report = waited_for(Run(named(name, settings)).report(chosen))
        if not report.passed:
            pytest.fail(f"{name}\n{text(report, failed_only=True)}", pytrace=False)
        return report

    return check
