"""`ng_collect_rollouts`: rows played by running servers, as `gymsdk rollout --head` does it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gymsdk.cli.progress import ProgressReporter, format_metrics_table, show_warnings
from gymsdk.cli.stopping import Stopped, run_until_signal
from gymsdk.rollouts.plan import Plan
from gymsdk.rollouts.run import Run, RunLimits, execute
from gymsdk.types import Row
from gymsdk_nemo_compat.collection import Collection, read
from gymsdk_nemo_compat.files import Files
from gymsdk_nemo_compat.place import head
from gymsdk_nemo_compat.words import carried_out

USAGE = "ng_collect_rollouts +agent_name=NAME +input_jsonl_fpath=FILE +output_jsonl_fpath=FILE: gymsdk rollout --head."
STOPPED = "stopped; the same words with +resume_from_cache=true go on\n"


def main() -> None:
    """Collect rollouts; exit code 1 where one has no reward."""
    carried_out(_collect, usage=USAGE)


def _collect(words: Sequence[str]) -> None:
    asked, ignored, rest = read(words)
    if ignored:
        sys.stderr.write(f"gymsdk ignores these keys of NeMo Gym: {', '.join(ignored)}\n")
    files = Files(asked.output_jsonl_fpath)
    run = _run(asked, files, head(rest))
    with files.kept():
        figures = _played(run)
    sys.stdout.write(
        "\n".join([format_metrics_table(figures), *(str(path) for path in files.names if path.exists())]) + "\n"
    )
    if any(each["failures"] or each["complaint"] for each in figures):
        sys.exit(1)


def _run(asked: Collection, files: Files, head_url: str) -> Run:
    plan = Plan(
        environments={},
        head=head_url,
        tasks=asked.input_jsonl_fpath,
        agent=asked.agent_name,
        limit=asked.limit,
        repeats=asked.num_repeats,
        sampling=asked.responses_create_params,
    )
    pace = RunLimits(concurrency=asked.num_samples_in_parallel)
    resume = asked.resume_from_cache
    # What was collected into the same file before is replaced, as NeMo Gym does it.
    return Run(plan, files.folder, resume=resume, overwrite=not resume, limits=pace)


def _played(run: Run) -> list[Row]:
    with ProgressReporter() as watch, show_warnings():
        try:
            return run_until_signal(execute(run, watch), last_words=STOPPED)
        except Stopped as stop:
            sys.stderr.write(STOPPED)
            sys.exit(stop.code)
