"""Files: configuration files and those they include, in the order in which later ones win."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from gymsdk.config import untrusted, yaml
from gymsdk.config.model import (
    AGENTS,
    ENVIRONMENTS,
    IMPLEMENTATIONS,
    MODELS,
    POLICY_SERVER,
    RESOURCES,
    UNSUPPORTED_MODEL_SERVERS,
    normalize_keys,
)
from gymsdk.config.resolve import expand_variables
from gymsdk.config.yaml import Node, Place, Problems
from gymsdk.errors import BadConfig, format_suggestion

BUILTIN_PATH_PATTERN = re.compile(
    rf"(?:.*/)?(?P<kind>{RESOURCES}|{AGENTS}|{MODELS}|{ENVIRONMENTS})/(?P<name>[^/]+)/(?:configs/)?(?P<file>[^/]+)\.ya?ml"
)
"""An entry that names one of NeMo Gym's files, wherever its checkout would be."""

ENDPOINT_KEYS = {"openai_model": ("openai_base_url", "openai_api_key", "openai_model")}
DEFAULT_ENDPOINT_KEYS = ("base_url", "api_key", "model")
TRAINING_SUFFIX = "_for_training"

FILES_WITHOUT_JUDGE = {
    name: (name, "dapo17k", "bytedtsinghua_dapo17k") for name in ("library_judge_math", "math_with_judge")
}
"""The files of resources servers that can have a judge which have it switched off: the built-in text has none."""

RESOURCES_TEXT = """\
{name}:
  resources_servers:
    {name}:
      entrypoint: app.py
{name}_simple_agent:
  responses_api_agents:
    simple_agent:
      entrypoint: app.py
      resources_server: {{type: resources_servers, name: {name}}}
      model_server: {{type: responses_api_models, name: policy_model}}
"""
SERVER_TEXT = """\
{name}:
  {kind}:
    {name}:
      entrypoint: app.py
"""
MODEL_TEXT = """\
{policy}:
  responses_api_models:
    {name}:
      entrypoint: app.py
      {base_url}: ${{policy_base_url}}
      {api_key}: ${{policy_api_key}}
      {model}: ${{policy_model_name}}
"""


def build_builtin_file(entry: str) -> str | None:
    """Give what the file *entry* of NeMo Gym says, `None` where it has not the shape of one; raises `BadConfig`."""
    found = BUILTIN_PATH_PATTERN.fullmatch(entry)
    if found is None:
        return None
    kind, name, file = found["kind"], found["name"], found["file"]
    if kind == RESOURCES:
        return _resources(name, file)
    return _model(name, file) if kind == MODELS else _server(kind, name)


def _check_name(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name):
        return name
    raise BadConfig(f"{name!r} can be no environment's name")


def _resources(name: str, file: str) -> str:
    files = FILES_WITHOUT_JUDGE.get(name)
    if files is not None and file not in files:
        raise BadConfig(
            f"{name} has no file {file}.yaml here, as that one may ask a judge; put the file there, or name "
            f"{name}.yaml and set {name}.{name}.judge=PROVIDER/NAME"
        )
    return RESOURCES_TEXT.format(name=_check_name(name))


def _server(kind: str, name: str) -> str:
    known = IMPLEMENTATIONS[AGENTS if kind == AGENTS else ENVIRONMENTS]
    if name in known:
        return SERVER_TEXT.format(kind=kind, name=name)
    what = "agent" if kind == AGENTS else "environment server"
    raise BadConfig(f"there is no {what} {name!r} here{format_suggestion(name, known, f'there are {_listed(known)}')}")


def _model(name: str, file: str) -> str:
    if name in UNSUPPORTED_MODEL_SERVERS:
        raise BadConfig(f"{name} has no counterpart here; {UNSUPPORTED_MODEL_SERVERS[name]}")
    known = tuple(each for each in IMPLEMENTATIONS[MODELS] if each != "gymsdk_model")
    if name not in known:
        raise BadConfig(
            f"there is no model server {name!r} here{format_suggestion(name, known, f'there are {_listed(known)}')}"
        )
    if file.removesuffix(TRAINING_SUFFIX) != name:
        files = (name, f"{name}{TRAINING_SUFFIX}")
        raise BadConfig(
            f"{name} has no file {file}.yaml here{format_suggestion(file, files, f'there are {_listed(files)}')}"
        )
    base_url, api_key, model = ENDPOINT_KEYS.get(name, DEFAULT_ENDPOINT_KEYS)
    written = MODEL_TEXT.format(policy=POLICY_SERVER, name=name, base_url=base_url, api_key=api_key, model=model)
    return written + "      return_token_id_information: true\n" * file.endswith(TRAINING_SUFFIX)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names)


INCLUDE_KEY = "config_paths"


class FileLoader:
    """The files of one configuration, looked for in *folder*; each counts once, what it includes before it."""

    def __init__(self, folder: Path, problems: Problems) -> None:
        self._folder = folder
        self._problems = problems
        self._read: set[str] = set()
        self._open: dict[str, str] = {}

    def load_files(
        self, entries: Sequence[tuple[str, Place]], beside: Path | None = None, *, found: bool = False
    ) -> Iterator[Node]:
        """Yield the settings of each of *entries* in order, each after the files that it includes.

        Args:
            entries: Paths, or names of built-in files, each with the place that names it.
            beside: The folder of the including file, where its entries are looked up first.
            found: Whether nobody named these files; their nodes' places then say so.
        """
        for entry, place in entries:
            try:
                yield from self._one(entry, place, beside, found=found)
            except BadConfig as error:
                self._problems.add_error(error)

    def load_file(self, path: Path, *, found: bool = False) -> Iterator[Node]:
        """Yield the settings of the file at *path* if it exists; *found* as for `named`."""
        if path.is_file():
            yield from self.load_files([(str(path), Place(source=self._shown(path)))], found=found)

    def _one(self, entry: str, place: Place, beside: Path | None, *, found: bool) -> Iterator[Node]:
        folders = [beside, self._folder] if beside else [self._folder]
        path = next((path for folder in folders if (path := folder / entry).is_file()), None)
        text = self._builtin(entry, place, folders) if path is None else _read_text(path, self._shown(path))
        source = f"built-in {entry}" if path is None else self._shown(path)
        identity = entry if path is None else str(path.resolve())
        if identity in self._open:
            shown = [*self._open.values()][[*self._open].index(identity) :]
            chain = " includes ".join([*shown, source])
            raise BadConfig(f"{place}: {chain}; take one of them out of config_paths")
        if identity in self._read:
            return
        self._read.add(identity)
        self._open[identity] = source
        try:
            root = _mapping(yaml.parse_yaml(text, source))
            root = root.mark_found() if found else root
            yield from self.load_files(read_includes(root, self._problems), path.parent if path else None, found=found)
        finally:
            del self._open[identity]
        yield normalize_keys(root.without(INCLUDE_KEY))

    def _builtin(self, entry: str, place: Place, folders: Iterable[Path]) -> str:
        try:
            text = build_builtin_file(entry)
        except BadConfig as error:
            raise BadConfig(f"{place}: {entry}: {error}") from None
        if text is not None:
            return text
        if any((folder / entry).is_dir() for folder in folders):
            raise BadConfig(f"{place}: {entry} is a folder; name a file in it")
        there = [each.name for pattern in ("*.yaml", "*.yml") for each in self._folder.glob(pattern)]
        near = format_suggestion(entry, there, "a path is looked up beside the file that names it, then in the folder")
        raise BadConfig(f"{place}: there is no file {entry}{near}")

    def _shown(self, path: Path) -> str:
        try:
            return str(path.resolve().relative_to(self._folder.resolve()))
        except ValueError:
            return str(path)


def read_includes(root: Node, problems: Problems) -> list[tuple[str, Place]]:
    """Give the entries that *root* includes, one or several."""
    node = root.get(INCLUDE_KEY)
    if node is None or node.value is None:
        return []
    refused = Problems()
    untrusted.check_untrusted_references(node, (INCLUDE_KEY,), node, refused)
    if refused:
        problems.merge(refused)
        return []
    below = node.value if isinstance(node.value, list) else [node]
    entries = [(expand_variables(each.value), each.place) for each in below if isinstance(each.value, str)]
    if len(entries) < len(below):
        problems.add(node.place, "config_paths must be a list of files, as in config_paths: [a.yaml, b.yaml]")
    return [(entry.strip(), place) for entry, place in entries if entry.strip()]


def is_readable_by_others(path: Path) -> bool:
    """Whether others than its owner may read *path*."""
    return path.is_file() and bool(path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))


def _mapping(root: Node) -> Node:
    if root.value is None:
        return Node({}, root.place)
    if root.is_mapping:
        return root
    raise BadConfig(f"{root.place}: a configuration is made of `key: value` lines, as in default_host: 127.0.0.1")


def _read_text(path: Path, shown: str) -> str:
    read = b""
    try:
        read = path.read_bytes()
        return read.decode()
    except UnicodeDecodeError as error:
        line = read.count(b"\n", 0, error.start) + 1
        raise BadConfig(f"{shown}:{line}: this cannot be read ({type(error).__name__}); give UTF-8 text") from None
    except OSError as error:
        raise BadConfig(f"{shown}: this cannot be read ({error.strerror}); give a file of UTF-8 text") from None
