"""A plan: everything that decides what a run's rollouts are, written down so that a resume can be held to it."""

from __future__ import annotations

import hashlib
import platform
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, SecretStr
from pydantic_core import PydanticSerializationError, to_jsonable_python

from gymsdk.environment import Environment, is_model_field
from gymsdk.episode import Budget
from gymsdk.errors import BadRow
from gymsdk.models.options import load_policy_settings
from gymsdk.responses import Api
from gymsdk.rollouts.tasks import default_split
from gymsdk.types import Row

ELSEWHERE = frozenset({"base_url", "head", "tasks", "environments"})
"""What of a plan is not compared as it is: where something is served may change, the rest goes by its content."""


class Plan(BaseModel):
    """What a run plays: the environments with their settings, the model, the rows, the seeds and the bounds.

    With a *head* it is played by the servers that the head knows, with the model that is theirs; rows that name no
    agent are for *agent*.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    environments: dict[str, dict[str, Any]]
    model: str | None = None
    head: str | None = None
    base_url: str | None = None
    api: Api | None = None
    pinned: dict[str, Any] = {}
    tokens: bool = False
    tasks: Path | None = None
    agent: str | None = None
    split: str | None = None
    limit: int | None = None
    skip_bad_rows: bool = False
    repeats: int = 1
    seed: int = 0
    sampling: dict[str, Any] = {}
    budget: Budget = Budget()


def settings(plan: Plan, environments: Mapping[str, Environment], servers: Row | None = None) -> Row:
    """Give *plan* as a resume is held to it, the code and the rows it depends on as fingerprints.

    *environments* are those that are loaded here: of others nothing is known but what their *servers* tell.
    """
    return plan.model_dump(mode="json", exclude=set(ELSEWHERE)) | {
        "model": plan.model and plan.model.partition("@http")[0],
        "head": True if plan.head else None,
        "tokens": plan.tokens or None,
        "servers": servers,
        "gymsdk": version("gymsdk"),
        "split": None if plan.tasks else {name: _split(plan, each) for name, each in environments.items()},
        "environments": {
            name: _environment(environments[name], given) if name in environments else {}
            for name, given in plan.environments.items()
        },
        "tasks": _tasks(plan.tasks) if plan.tasks else None,
    }


def _split(plan: Plan, environment: Environment) -> str | None:
    return plan.split or (default_split(environment) if environment.splits else None)


def _environment(environment: Environment, given: Mapping[str, Any]) -> Row:
    """Give the environment's version, code, and settings, those left at their default too; secrets are masked."""
    fields = type(environment.config).model_fields
    models = {key for key, field in fields.items() if is_model_field(field)}
    own = environment.config.model_dump(exclude=models)
    return {
        "version": environment.version,
        "fingerprint": fingerprint(environment.plugin),
        "settings": {key: _setting(value, given.get(key)) for key, value in own.items()}
        | {key: str(given[key]) for key in models & given.keys()},
    }


def _setting(value: object, given: object) -> Any:
    """Give a setting as JSON that is the same in every process; one that is none by its *given* text, or its type."""
    try:
        return _plain(value)
    except PydanticSerializationError:
        return given if isinstance(given, str) else _plain(value, fallback=lambda each: type(each).__qualname__)


def _plain(value: object, fallback: Callable[[Any], Any] | None = None) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each, fallback) for key, each in value.items()}
    if isinstance(value, (set, frozenset)):
        # Their order goes by the hash seed, which each process draws anew.
        return sorted((_plain(each, fallback) for each in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_plain(each, fallback) for each in value]
    return to_jsonable_python(value, fallback=fallback, inf_nan_mode="strings")


def _tasks(path: Path) -> str:
    if not path.is_file():
        reason = "it is a folder" if path.is_dir() else "it is no file" if path.exists() else "there is no such file"
        raise BadRow(f"--tasks {path}: {reason}; name a JSONL file")
    try:
        return _digest({"": path})
    except OSError as error:
        raise BadRow(f"--tasks {path}: {error.strerror}; name a JSONL file that can be read") from None


def differences(begun: Row, asked: Row) -> list[str]:
    """Give how *asked* differs from what a run was begun with, a phrase for each setting."""
    before, now = dict(_flat(begun)), dict(_flat(asked))
    other_source = bool(begun.get("tasks")) != bool(asked.get("tasks"))
    return [
        _phrase(path, before.get(path), now.get(path))
        for path in dict.fromkeys([*before, *now])
        if before.get(path) != now.get(path) and not (other_source and path[0] == "split")
    ]


def _flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, (*path, str(key)))
    else:
        yield path, value


OPTIONS = {
    ("sampling", "temperature"): "--temperature",
    ("sampling", "top_p"): "--top-p",
    ("sampling", "max_output_tokens"): "--max-output-tokens",
    ("budget", "turns"): "--turns",
    ("budget", "tools"): "--tool-calls",
    ("budget", "seconds"): "--deadline",
    ("tokens",): "--token-ids",
    ("gymsdk",): "the version of gymsdk",
    ("servers", "model"): "the model of the servers",
    ("servers", "gymsdk"): "the servers' version of gymsdk",
}
"""How the settings are called that are not simply named like their option."""


def _phrase(path: tuple[str, ...], before: object, now: object) -> str:
    match path:
        case ("tasks",):
            changed = before is not None and now is not None
            return (
                "the content of the --tasks file has changed"
                if changed
                else f"--tasks was {_told(bool(before))}, now {_told(bool(now))}"
            )
        case ("environments", name, "fingerprint") if before is not None and now is not None:
            return f"the code of environment {name!r} has changed"
        case ("servers", "versions", name):
            option = f"the version of environment {name!r} at the servers"
        case ("split", name):
            option = f"--split of {name}"
        case ("environments", name, "settings", *keys):
            option = f"--set {name}.{'.'.join(keys)}"
        case ("environments", name, what):
            option = f"the {what} of environment {name!r}"
        case ("sampling", *keys) if path not in OPTIONS:
            option = f"--param {'.'.join(keys)}"
        case ("pinned", *keys):
            option = f"--pin {'.'.join(keys)}"
        case _:
            option = OPTIONS.get(path, "--" + ".".join(path).replace("_", "-"))
    return f"{option} was {_told(before)}, now {_told(now)}"


def _told(value: object) -> str:
    if value is None or value is False:
        return "not given"
    return "given" if value is True else str(value)


def fingerprint(plugin: object) -> str:
    """Give a digest of the files *plugin* is made of: its package's, or its module's alone."""
    module = sys.modules.get(getattr(plugin, "__name__", type(plugin).__module__))
    file = getattr(module, "__file__", None)
    if file is None:
        return ""
    home = Path(file)
    if home.name != "__init__.py":
        return _digest({home.name: home})
    files = (path for path in home.parent.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return _digest({str(path.relative_to(home.parent)): path for path in sorted(files)})


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in files.items():
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


def occasion(plan: Plan, environments: Iterable[Environment]) -> Row:
    """Give when, where and by which command a run is played, and where its model is."""
    address, secrets = plan.base_url or load_policy_settings().policy_base_url, _secrets(environments)
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
