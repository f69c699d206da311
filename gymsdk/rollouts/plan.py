"""The plan of a run: everything that determines its rollouts, stored so that a resume can be compared with it."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.metadata import distributions
from pathlib import Path
from secrets import token_hex
from typing import Any

from pydantic import Field
from pydantic_core import PydanticSerializationError, to_jsonable_python

from gymsdk import __version__
from gymsdk.config.show import redact_settings, redact_words
from gymsdk.convert.chat import parse_metadata_extras
from gymsdk.credentials import iter_secrets
from gymsdk.environment import Environment, is_model_field
from gymsdk.errors import BadRow, Failed
from gymsdk.http.tls import mask_url, split_addresses
from gymsdk.models.exact_tokens import SAMPLING
from gymsdk.models.options import load_policy_settings
from gymsdk.rollouts.fingerprint import CODE_PARTS, GRADERS, describe_code, digest_files, drop_unknown_parts
from gymsdk.rollouts.jobs import Job
from gymsdk.rollouts.settings import Rows, Servers
from gymsdk.rollouts.tasks import get_default_split
from gymsdk.types import Budget, Item, Model, Row
from gymsdk.working_folder import get_working_folder, shorten_path

UNCOMPARED_FIELDS = frozenset({"head", "tasks", "environments", "model_options"})
"""Fields that a resume does not compare directly: addresses may change; digests represent tasks and environments."""


class Plan(Rows, Servers):
    """The environments of a run and their settings, the model, the rows, the seeds and the budget.

    With a *head*, the servers that the head knows play the run, with their own model; a row without an agent goes to
    *agent*.
    """

    environments: dict[str, dict[str, Any]]
    """The settings of each environment that the user has set, by the environment's name."""
    model: str | None = None
    model_options: Mapping[str, Any] = Field({}, description="The fields of `ModelOptions` that the user has set.")
    sampling: dict[str, Any] = Field({})
    budget: Budget = Budget()


ENVIRON_KEY = "environ_key"
"""The setting of a run with which it hashes the values of variables."""


def build_settings(
    plan: Plan, environments: Mapping[str, Environment], servers: Row | None = None, *, stored: Row | None = None
) -> Row:
    """Return the settings that a resume must share with the run, with digests of the code and of the rows.

    Args:
        plan: The plan of the run.
        environments: The environments that are loaded in this process.
        servers: The identity of the servers that play the run; see `Served.identity`.
        stored: The settings of the run to resume, with which the result is compared.
    """
    key = str(stored.get(ENVIRON_KEY, "")) if stored is not None else token_hex(16)
    return plan.model_dump(mode="json", exclude=set(UNCOMPARED_FIELDS)) | {
        "model": plan.model and plan.model.partition("@http")[0],
        "api": plan.model_options.get("api"),
        "pinned": plan.model_options.get("pinned", {}),
        "tokens": plan.model_options.get("tokens") or None,
        "head": True if plan.head else None,
        "servers": servers,
        "gymsdk": __version__,
        ENVIRON_KEY: key,
        "split": None
        if plan.tasks
        else {
            name: plan.split or (get_default_split(environment) if environment.splits else None)
            for name, environment in environments.items()
        },
        "environments": {
            name: _describe_environment(environments[name], settings, key) if name in environments else {}
            for name, settings in plan.environments.items()
        },
        "tasks": _digest_tasks(plan.tasks) if plan.tasks else None,
    }


def _describe_environment(environment: Environment, settings: Mapping[str, Any], key: str) -> Row:
    """Return the version, the identity of the code and all settings of an environment, with secrets masked.

    The user has set only *settings*; the result also contains the defaults.
    """
    fields = type(environment.config).model_fields
    model_keys = {key for key, field in fields.items() if is_model_field(field)}
    values = environment.config.model_dump(exclude=model_keys)
    return {
        "version": environment.version,
        **describe_code(environment.name, environment.plugin, key),
        "settings": redact_settings(
            {key: _dump_setting(value, settings.get(key)) for key, value in values.items()}
            | {key: str(settings[key]) for key in model_keys & settings.keys()}
        ),
    }


def _dump_setting(value: object, user_value: object) -> Any:
    """Return a setting as JSON that is the same in every process.

    A value that JSON cannot express is represented by the text that the user has set, or by the name of its type.
    """
    try:
        return _to_stable_json(value)
    except PydanticSerializationError:
        if isinstance(user_value, str):
            return user_value
        return _to_stable_json(value, fallback=lambda unknown: type(unknown).__qualname__)


def _to_stable_json(value: object, fallback: Callable[[Any], Any] | None = None) -> Any:
    if isinstance(value, dict):
        return {str(key): _to_stable_json(member, fallback) for key, member in value.items()}
    if isinstance(value, (set, frozenset)):
        # The iteration order of a set depends on the hash seed of the process.
        return sorted((_to_stable_json(member, fallback) for member in value), key=repr)
    if isinstance(value, (list, tuple)):
        return [_to_stable_json(member, fallback) for member in value]
    return to_jsonable_python(value, fallback=fallback, inf_nan_mode="strings")


def _digest_tasks(path: Path) -> str:
    """Return the digest of a task file; raises `BadRow` if the file cannot be read."""
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else "is not a regular file" if path.exists() else "does not exist"
        raise BadRow(f"--tasks {shorten_path(path)}: the path {reason}; name a JSONL file")
    try:
        return digest_files({"": path})
    except OSError as error:
        raise BadRow(
            f"--tasks {shorten_path(path)}: the file cannot be read ({error.strerror}); name a readable JSONL file"
        ) from None


def list_differences(stored: Row, requested: Row) -> list[str]:
    """Return one phrase for each setting in which *requested* differs from the *stored* run."""
    return [phrase for _, phrase in _iter_differences(stored, requested)]


def list_code_differences(stored: Row, requested: Row) -> list[str]:
    """Return the phrases of `list_differences` about changed code, which no option of the command can change back."""
    return [phrase for path, phrase in _iter_differences(stored, requested) if _is_code(path)]


def _iter_differences(stored: Row, requested: Row) -> Iterator[tuple[tuple[str, ...], str]]:
    # Version 0.1 did not redact all secrets in a stored run.
    environments = stored.get("environments") or {}
    redacted = {
        name: settings | {"settings": redact_settings(settings.get("settings", {}))}
        for name, settings in environments.items()
    }
    comparable = requested | {"environments": drop_unknown_parts(environments, requested["environments"])}
    before, now = dict(_flatten(stored | {"environments": redacted})), dict(_flatten(comparable))
    changed_source = bool(stored.get("tasks")) != bool(requested.get("tasks"))
    for path in dict.fromkeys([*before, *now]):
        is_derived = path[0] == ENVIRON_KEY or (changed_source and path[0] == "split")
        if before.get(path) != now.get(path) and not is_derived:
            yield path, _describe_difference(path, before.get(path), now.get(path))


def _is_code(path: tuple[str, ...]) -> bool:
    """Return whether a setting identifies code: of gymsdk, of an environment, or of the servers."""
    match path:
        case ("gymsdk",) | ("servers", "gymsdk") | ("servers", "versions", *_):
            return True
        case ("environments", _, part, *_):
            return part in CODE_PARTS
    return False


def _flatten(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flatten(inner, (*path, str(key)))
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
"""The names in messages of the settings whose option has a different name."""


def _describe_difference(path: tuple[str, ...], before: object, now: object) -> str:
    match path:
        case ("tasks",):
            changed = before is not None and now is not None
            return (
                "the content of the --tasks file has changed"
                if changed
                else f"--tasks was {_format_value(bool(before))}, now {_format_value(bool(now))}"
            )
        case ("environments", name, "fingerprint") if before is not None and now is not None:
            return f"the code of environment {name!r} has changed"
        case ("environments", name, "imports" | "environ" | "distributions" as part, item):
            return _describe_code_change(part, item, name, before, now)
        case ("servers", "versions", name):
            option = f"the version of environment {name!r} at the servers"
        case ("split", name):
            option = f"--split of {name}"
        case ("environments", name, "settings", *keys):
            option = f"--set {name}.{'.'.join(keys)}"
        case ("environments", name, key):
            option = f"the {key} of environment {name!r}"
        case ("sampling", *keys) if path not in OPTIONS:
            option = f"--param {'.'.join(keys)}"
        case ("pinned", *keys):
            option = f"--pin {'.'.join(keys)}"
        case _:
            option = OPTIONS.get(path, "--" + ".".join(path).replace("_", "-"))
    return f"{option} was {_format_value(before)}, now {_format_value(now)}"


def _describe_code_change(part: str, item: str, name: str, before: object, now: object) -> str:
    """Describe the change of one item of a part of the identity of environment *name*."""
    about, absent = {
        "imports": (f"module {item!r}, which environment {name!r} imports,", "missing"),
        "environ": (f"the variable {item} of environment {name!r}", "not set"),
        "distributions": (f"distribution {item!r} of environment {name!r}", "not installed"),
    }[part]
    if before is None or now is None:
        return f"{about} was {absent if before is None else 'there'}, now {absent if now is None else 'there'}"
    if item.startswith(GRADERS):
        return f"the grader of environment {name!r} was {before}, now {now}"
    old, new = (str(version).rpartition(" ")[0] for version in (before, now))
    return f"{about} was {old}, now {new}" if old != new else f"{about} has changed"


def _format_value(value: object) -> str:
    if value is None or value is False:
        return "not given"
    return "given" if value is True else str(value)


def describe_start(plan: Plan, environments: Iterable[Environment]) -> Row:
    """Return when, where and with which command the run starts, and the address of its model; without secrets."""
    address = (
        ",".join(split_addresses(plan.model_options.get("base_url") or ())) or load_policy_settings().policy_base_url
    )
    secrets = [*iter_secrets([environment.config for environment in environments])]
    return {
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": shlex.join([*describe_program(), *redact_words(sys.argv[1:], secrets)]),
        "folder": str(get_working_folder()),
        "base_url": mask_url(address) if address and not (plan.model or "scripted/").startswith("scripted/") else None,
        "head": plan.head and mask_url(plan.head),
    }


def describe_program() -> list[str]:
    """Return the command that starts this program."""
    name = Path(sys.argv[0]).name
    return ["python", "-m", "gymsdk"] if name == "__main__.py" else [name]


def describe_host() -> Row:
    """Return the versions of Python, of the platform and of all installed distributions."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "distributions": dict(
            sorted((distribution.name, distribution.version) for distribution in distributions() if distribution.name)
        ),
    }


# The sampling parameters that a run sends, and those of runs begun before

SAMPLING_KEY = "sampling"
"""The key of run.json with the sampling parameters that the run sends. Earlier versions did not write it."""

ENGINE_DEFAULTS = "the engine's defaults"
SERVER_DEFAULTS = "the defaults of the servers' model"
EARLIER_SAMPLING = "temperature 1.0, top_p 1.0, unless a row sets them, as when the run began"


def describe_sampling(model: Model | None, requested: Mapping[str, Any]) -> str | None:
    """Return the sampling parameters of a run as text, `None` for a model that samples no tokens.

    Args:
        model: The model of the policy; `None` if servers play the run.
        requested: The parameters with which the run overrides those of the rows.
    """
    get_sampling = getattr(model, "get_sampling", None)
    if model is not None and get_sampling is None:
        return None
    sent = get_sampling(dict(requested)) if get_sampling is not None else requested
    defaults = ENGINE_DEFAULTS if model is not None else SERVER_DEFAULTS
    settings = ", ".join(f"{name} {value}" for name, value in sent.items() if value is not None)
    return f"{settings}; otherwise {defaults}" if settings else defaults


def began_with_fixed_sampling(about: Mapping[str, Any], models: Collection[str]) -> bool:
    """Whether a run was begun by a version that sent temperature and top_p 1.0 to *models* if no row set them."""
    return SAMPLING_KEY not in about and bool(models) and all(name.startswith("vllm/") for name in models)


async def add_earlier_sampling(jobs: AsyncIterator[Job], model: Model | None) -> AsyncIterator[Job]:
    """Yield *jobs* with the sampling parameters that earlier versions sent to *model* for rows without them."""
    get_sampling = getattr(model, "get_sampling", None)
    configured = get_sampling({}) if get_sampling is not None else {}
    defaults = {key: value for key, value in SAMPLING.items() if key not in configured}
    async for job in jobs:
        params = job.row["responses_create_params"]
        own = {key for key, value in {**_read_extras(params), **params}.items() if value is not None}
        added = {key: value for key, value in defaults.items() if key not in own}
        yield replace(job, row={**job.row, "responses_create_params": {**params, **added}})


def _read_extras(params: Item) -> Item:
    try:
        return parse_metadata_extras(params)
    except Failed:
        # The call of the model refuses the row.
        return {}
