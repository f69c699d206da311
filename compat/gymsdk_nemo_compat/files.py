"""Files: a run's folder, and the names that NeMo Gym gives what is in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gymsdk.errors import UsageError


def _doubled(there: Path, path: Path) -> None:
    """Have one file under two names, so that who moves or removes either leaves the other whole."""
    try:
        os.link(there, path)
    except OSError:
        # Some file systems have no second names.
        shutil.copy2(there, path)


@dataclass(frozen=True, slots=True)
class Files:
    """What stands beside *output*, the file of the rollouts, and the folder of the run itself."""

    output: Path

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.output.with_name(f"{self.output.stem}_run")

    @property
    def names(self) -> dict[Path, str]:
        """The files by what they are called in the folder."""
        return {
            self.output: "rollouts.jsonl",
            self._beside("materialized_inputs"): "inputs.jsonl",
            self._beside("failures"): "failures.jsonl",
            self._beside("aggregate_metrics").with_suffix(".json"): "metrics.json",
        }

    def _beside(self, what: str) -> Path:
        return self.output.with_stem(f"{self.output.stem}_{what}")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Have the files where they are looked for: as links while the run writes them, for themselves afterwards.

        Raises `UsageError` where there are some that no run of ours has written.
        """
        if not self.folder.exists() and (others := [str(path) for path in self.names if path.exists()]):
            raise UsageError(f"{', '.join(others)} would be replaced; remove that, or name another output_jsonl_fpath")
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
                if (there := self.folder / name).exists():
                    _doubled(there, path)
