"""A run's origin: when, where and on what it is played, secrets left out."""

from __future__ import annotations

import platform
import re
import shlex
import sys
import time
from collections.abc import Iterable
from importlib.metadata import distributions
from pathlib import Path

from pydantic import SecretStr

from gymsdk.environment import Environment
from gymsdk.rollouts.plan import Plan
from gymsdk.settings import settings
from gymsdk.types import Row


def occasion(plan: Plan, environments: Iterable[Environment]) -> Row:
    """Give when, where and by which command a run is played, and where its model is."""
    address, secrets = plan.base_url or settings().policy_base_url, _secrets(environments)
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([*program(), *(_without(secrets, word) for word in sys.argv[1:])]),
        "folder": str(Path.cwd()),
        "base_url": _without([], address) if address and _has_address(plan) else None,
        "head": plan.head and _without([], plan.head),
    }


def _has_address(plan: Plan) -> bool:
    return plan.model is not None and not plan.model.startswith("scripted/")


def program() -> list[str]:
    """Give the words that start this program again."""
    name = Path(sys.argv[0]).name
    return ["python", "-m", "gymsdk"] if name == "__main__.py" else [name]


def host() -> Row:
    """Give the versions of everything installed."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "distributions": dict(sorted((each.name, each.version) for each in distributions() if each.name)),
    }


def _secrets(environments: Iterable[Environment]) -> list[str]:
    values = [value for each in environments for value in vars(each.config).values()]
    return [value.get_secret_value() for value in values if isinstance(value, SecretStr)]


def _without(secrets: Iterable[str], text: str) -> str:
    for secret in filter(None, secrets):
        text = text.replace(secret, "***")
    # Who asks, in an address: http://USER:PASSWORD@HOST, and whatever key its query may have.
    return re.sub(r"(?<=://)([^?\s]*)\?\S*", r"\1?***", re.sub(r"(?<=://)[^/@\s]+@", "***@", text))
