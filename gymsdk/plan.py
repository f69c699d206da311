"""A plan: everything that decides what a run's rollouts are, written down so that a resume can be held to it."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

import gymsdk
from gymsdk.environment import Environment
from gymsdk.episode import Budget
from gymsdk.types import Row
from gymsdk.wire import Api


class Plan(BaseModel):
    """What a run plays: the environments with their settings, the model, the rows, the seeds and the bounds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environments: dict[str, dict[str, Any]]
    model: str
    base_url: str | None = None
    api: Api | None = None
    tasks: Path | None = None
    split: str | None = None
    limit: int | None = None
    skip_bad_rows: bool = False
    repeats: int = 1
    seed: int = 0
    sampling: dict[str, Any] = {}
    budget: Budget = Budget()


def settings(plan: Plan, environments: Mapping[str, Environment]) -> Row:
    """Give *plan* as it is compared on a resume, the code and the rows it depends on as fingerprints."""
    named = {
        name: {
            "version": environments[name].version,
            "fingerprint": fingerprint(environments[name].plugin),
            "settings": given,
        }
        for name, given in plan.environments.items()
    }
    tasks = {"file": plan.tasks.name, "sha256": _digest([plan.tasks])} if plan.tasks else None
    return plan.model_dump(mode="json") | {"environments": named, "tasks": tasks}


def about() -> Row:
    """Give what else is needed to repeat a run: the versions of everything installed, the command, the time."""
    return {
        "gymsdk": gymsdk.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "distributions": dict(sorted((each.name, each.version) for each in distributions())),
    }


def differences(begun: Row, asked: Row) -> list[str]:
    """Give how *asked* differs from what a run was begun with, a phrase for each setting."""
    before, now = dict(_flat(begun)), dict(_flat(asked))
    return [
        f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
    ]


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def fingerprint(plugin: object) -> str:
    """Give a digest of the files *plugin* is made of: its package's, or its module's alone."""
    module = sys.modules.get(getattr(plugin, "__name__", type(plugin).__module__))
    home = Path(getattr(module, "__file__", None) or __file__)
    if home.name != "__init__.py":
        return _digest([home])
    files = (path for path in home.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return _digest(sorted(files))


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
