"""The pytest plugin: `pytest --gymsdk NAME` runs every check as a test; `gymsdk_check` checks inside a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

# pytest imports this module at every start, so functions import gymsdk where they need it.
if TYPE_CHECKING:
    from gymsdk.checks.report import Check, Report
    from gymsdk.checks.run import CheckRun
    from gymsdk.types import Budget


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options `--gymsdk` and `--gymsdk-set`."""
    parser.getgroup("gymsdk").addoption(
        "--gymsdk",
        action="append",
        default=[],
        metavar="NAME",
        help="Check this installed environment, each check as a test; can be repeated.",
    )
    parser.getgroup("gymsdk").addoption(
        "--gymsdk-set",
        action="append",
        default=[],
        metavar="NAME.KEY=VALUE",
        help="Set a setting of an environment named by --gymsdk (KEY=VALUE with a single one); can be repeated.",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, items: list[pytest.Item]) -> None:
    """Add a test for each check of the named environments, before `-k` and `-m` select tests."""
    names = list(dict.fromkeys(session.config.getoption("--gymsdk")))
    for name, settings in _parse_settings(names, session.config.getoption("--gymsdk-set")).items():
        home = EnvironmentCollector.from_parent(session, name=f"gymsdk-{name}", run=_get_run(name, settings))
        items.extend(session.genitems(home))


def _parse_settings(names: list[str], pairs: list[str]) -> dict[str, dict[str, Any]]:
    """Return each environment's settings. Raises `pytest.UsageError` if a setting is malformed."""
    if not pairs:
        return {name: {} for name in names}
    from gymsdk.cli import options
    from gymsdk.errors import UsageError

    if not names:
        raise pytest.UsageError(f"--gymsdk-set {pairs[0]}: name the environment with --gymsdk NAME")
    try:
        return options.parse_settings(names, pairs)
    except UsageError as error:
        raise pytest.UsageError(str(error).replace("--set", "--gymsdk-set")) from None


def _get_run(name: str, settings: dict[str, Any]) -> CheckRun:
    """Return the run that the tests of environment *name* share. Raises `pytest.UsageError` if it is not installed."""
    from gymsdk.checks.run import CheckRun
    from gymsdk.checks.subject import build_subject
    from gymsdk.errors import GymsdkError

    try:
        return CheckRun(build_subject(name, settings))
    except GymsdkError as error:
        raise pytest.UsageError(f"--gymsdk {name}: {error}") from None


class EnvironmentCollector(pytest.Collector):
    """An environment with its checks as tests."""

    def __init__(self, *, run: CheckRun, **kwargs: Any) -> None:
        super().__init__(nodeid=kwargs["name"], **kwargs)
        self.run = run

    def collect(self) -> Iterator[pytest.Item]:
        """Yield a test for each check."""
        from gymsdk.checks.run import CHECKS

        for check in CHECKS:
            yield CheckItem.from_parent(self, name=check.id, check=check, run=self.run)


class CheckFailed(Exception):
    """A check failed; the message is its findings."""


class CheckItem(pytest.Item):
    """A check as a test."""

    def __init__(self, *, check: Check, run: CheckRun, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check = check
        self.run = run

    def runtest(self) -> None:
        """Run the check. The test fails with its findings, or is skipped with its reason."""
        from gymsdk.checks.report import format_details
        from gymsdk.checks.run import run_in_thread

        result = run_in_thread(self.run.run_check(self.check))
        for warning in result.warnings:
            self.add_report_section("call", "gymsdk warnings", warning)
        if result.status == "skipped":
            pytest.skip(result.reason)
        if result.status == "failed":
            raise CheckFailed("\n".join([result.requirement, *format_details(result)]))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Return the findings without a traceback."""
        from gymsdk.errors import UsageError

        if isinstance(excinfo.value, (CheckFailed, UsageError)):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return the location of the test: no file, but the check and its environment."""
        return self.config.rootpath, None, f"{self.run.subject.name}: {self.check.id}"


@pytest.fixture
def gymsdk_check() -> Callable[..., Report]:
    """Check an installed environment: `gymsdk_check("name", only=[...], skip=[...], budget=Budget(...), **settings)`.

    *budget* limits the episodes of the oracle. The test fails with the findings. Without findings, the function
    returns the report.
    """

    def check(
        name: str,
        /,
        *,
        only: str | Iterable[str] = (),
        skip: str | Iterable[str] = (),
        budget: Budget | None = None,
        **settings: Any,
    ) -> Report:
        from gymsdk.checks import run as catalog
        from gymsdk.checks.report import format_report
        from gymsdk.checks.run import CheckRun, run_in_thread
        from gymsdk.checks.subject import build_subject
        from gymsdk.errors import UsageError

        try:
            chosen = catalog.select_checks(only, skip)
            catalog.check_requirements(chosen)
            report = run_in_thread(CheckRun(build_subject(name, settings, budget=budget)).report(chosen))
        except UsageError as error:
            pytest.fail(f"gymsdk_check({name!r}): {error}", pytrace=False)
        if not report.passed:
            pytest.fail(f"{name}\n{format_report(report, failed_only=True)}", pytrace=False)
        return report

    return check
