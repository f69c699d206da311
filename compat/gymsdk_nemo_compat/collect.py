"""`ng_collect_rollouts` plays the rows of a file with running servers, as `gymsdk rollout --head` does."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gymsdk.cli.process import Stopped, run_until_signal
from gymsdk.cli.progress import ProgressReporter, format_metrics_table, show_warnings
from gymsdk.config.overrides import apply_overrides, parse_overrides
from gymsdk.config.yaml import COMMAND_LINE, Problems, YamlNode, to_plain
from gymsdk.errors import UsageError, format_error_detail
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.run import Run, execute
from gymsdk.rollouts.settings import RunLimits
from gymsdk.types import Row
from gymsdk_nemo_compat.commands import find_head, run_command
from gymsdk_nemo_compat.running import ServerRun

USAGE = (
    "ng_collect_rollouts +agent_name=NAME +input_jsonl_fpath=FILE +output_jsonl_fpath=FILE: runs gymsdk rollout --head."
)
STOPPED = "stopped; to continue, run the same command with +resume_from_cache=true\n"

UNSUPPORTED = {
    "num_repeats_add_seed": "repeats differ by the policy's sampling; set a seed with +responses_create_params.seed=N",
    "prompt_config": "write the prompts into the rows",
    "skills": "write the text of the skills into the rows",
    "rollout_collection_driver": "write a program with gymsdk.play",
    "split": "name the rows with input_jsonl_fpath, or play a dataset: gymsdk rollout --config FILE --dataset NAME",
}
"""Settings of NeMo Gym that gymsdk rejects, and what to do instead."""

IGNORED = frozenset({"upload_rollouts", "disable_aggregation", "disable_health_check", "interleave_repeats"})
"""Settings of NeMo Gym that have no effect here; a message names them."""


class CollectOptions(BaseModel):
    """The settings of `ng_collect_rollouts`: the rows to play, the agent that plays them, and the output file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    input_jsonl_fpath: Path
    output_jsonl_fpath: Path
    agent_name: str | None = None
    limit: int | None = Field(None, ge=1)
    num_repeats: int = Field(1, ge=1)
    num_samples_in_parallel: int = Field(64, ge=1)
    responses_create_params: dict[str, Any] = {}
    resume_from_cache: bool = False


TEXT_OPTIONS = frozenset({"input_jsonl_fpath", "output_jsonl_fpath", "agent_name"})
"""The settings that are text, also if YAML reads their values as numbers."""


@dataclass(frozen=True, slots=True)
class OutputFiles:
    """The files of a run under the names that NeMo Gym gives them; *output* is the file of the rollouts."""

    output: Path

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.output.with_name(f"{self.output.stem}_run")

    @property
    def names(self) -> dict[Path, str]:
        """The path of each file under its NeMo Gym name, and its name in the folder of the run."""
        return {
            self.output: "rollouts.jsonl",
            self._with_suffix("materialized_inputs"): "inputs.jsonl",
            self._with_suffix("failures"): "failures.jsonl",
            self._with_suffix("aggregate_metrics").with_suffix(".json"): "metrics.json",
        }

    def _with_suffix(self, suffix: str) -> Path:
        return self.output.with_stem(f"{self.output.stem}_{suffix}")

    @contextmanager
    def link(self) -> Iterator[None]:
        """Provide the files under their NeMo Gym names: as links during the run, as files of their own afterwards.

        Raises:
            UsageError: A file of this name exists that no run has written, or the files cannot be written.
        """
        if not self.folder.exists() and (others := [str(path) for path in self.names if path.exists()]):
            raise UsageError(f"{', '.join(others)} would be replaced; remove it, or name another output_jsonl_fpath")
        try:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            for path, name in self.names.items():
                path.unlink(missing_ok=True)
                path.symlink_to(Path(self.folder.name, name))
        except OSError as error:
            raise UsageError(f"{self.output} cannot be written: {error.strerror}; name another file") from None
        try:
            yield
        finally:
            for path, name in self.names.items():
                path.unlink(missing_ok=True)
                if (written := self.folder / name).exists():
                    _link_or_copy(written, path)


def ng_collect_rollouts() -> None:
    """Collect rollouts; exit with code 1 if a rollout has no reward."""
    run_command(collect, usage=USAGE)


def parse_options(arguments: Sequence[str]) -> tuple[CollectOptions, list[str], list[str]]:
    """Read the arguments of `ng_collect_rollouts`.

    Returns:
        The options, the keys that have no effect here, and the remaining arguments, which configure the connection to
        the head server.

    Raises:
        UsageError: An argument is malformed, unsupported or missing.
    """
    problems = Problems()
    overrides = {argument: override for argument in arguments for override in parse_overrides([argument], problems)}
    problems.raise_if_any()
    for setting in overrides.values():
        if (key := setting.path[0]) in UNSUPPORTED:
            raise UsageError(f"{key} has no equivalent in gymsdk; leave it out, and {UNSUPPORTED[key]}")
    own = [override for override in overrides.values() if override.path[0] in CollectOptions.model_fields]
    ignored = [override.path[0] for override in overrides.values() if override.path[0] in IGNORED]
    rest = [
        argument for argument, override in overrides.items() if override not in own and override.path[0] not in IGNORED
    ]
    nodes = apply_overrides(YamlNode({}, COMMAND_LINE), own, problems).children
    problems.raise_if_any()
    values = {key: to_plain(node.to_text() if key in TEXT_OPTIONS else node) for key, node in nodes.items()}
    return _validate({key: value for key, value in values.items() if value is not None}), ignored, rest


def _validate(values: dict[str, Any]) -> CollectOptions:
    try:
        options = CollectOptions.model_validate(values)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        key = ".".join(map(str, detail["loc"]))
        if detail["type"] == "missing":
            raise UsageError(f"{key} is missing; set it with +{key}=FILE") from None
        message = format_error_detail(detail)
        raise UsageError(f"{key}: {message[:1].lower()}{message[1:]}") from None
    if not options.input_jsonl_fpath.is_file():
        raise UsageError(f"input_jsonl_fpath: there is no file {options.input_jsonl_fpath}; name a JSONL file of rows")
    return options


def collect(arguments: Sequence[str], *, serve: Callable[[Sequence[str]], ServerRun] | None = None) -> None:
    """Collect the rollouts that the *arguments* describe; exit with code 1 if a rollout has no reward.

    Args:
        arguments: The settings of the collection and of the servers, in the form `+key=value`.
        serve: Starts the servers with the settings that are not the collection's own. By default, these settings find
            running servers.

    Raises:
        UsageError: An argument is wrong, or the servers cannot be started as requested.
    """
    options, ignored, rest = parse_options(arguments)
    if ignored:
        sys.stderr.write(f"gymsdk ignores these keys of NeMo Gym: {', '.join(ignored)}\n")
    files = OutputFiles(options.output_jsonl_fpath)
    with ExitStack() as stack:
        if serve is None:
            head_url = find_head(rest)
        else:
            servers = serve(rest)
            stack.callback(servers.stop)
            head_url = servers.head_url
        run = _build_run(options, files, head_url)
        stack.enter_context(files.link())
        metrics = _execute(run)
    written = [str(path) for path in files.names if path.exists()]
    sys.stdout.write("\n".join([format_metrics_table(metrics), *written]) + "\n")
    if any(summary["failures"] or summary["complaint"] for summary in metrics):
        sys.exit(1)


def _build_run(options: CollectOptions, files: OutputFiles, head_url: str) -> Run:
    plan = Plan(
        environments={},
        head=head_url,
        tasks=options.input_jsonl_fpath,
        agent=options.agent_name,
        limit=options.limit,
        repeats=options.num_repeats,
        sampling=options.responses_create_params,
    )
    limits = RunLimits(concurrency=options.num_samples_in_parallel)
    resume = options.resume_from_cache
    # As with NeMo Gym, a new collection replaces an older one in the same file.
    return Run(plan, files.folder, resume=resume, overwrite=not resume, limits=limits)


def _execute(run: Run) -> list[Row]:
    with ProgressReporter() as progress, show_warnings():
        try:
            return run_until_signal(execute(run, progress), last_words=STOPPED)
        except Stopped as stop:
            sys.stderr.write(STOPPED)
            sys.exit(stop.code)


def _link_or_copy(file: Path, path: Path) -> None:
    """Give *file* the second name *path*: if the user moves or removes one of them, the other remains."""
    try:
        os.link(file, path)
    except OSError:
        # Some file systems do not support hard links.
        shutil.copy2(file, path)
