"""The build of an editable install: its extra `dev` brings the environments of the same checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilder, WheelBuilderConfig

WHEELS = Path("build", "editable")
"""Where the environments' editable wheels are built; pip installs them from there."""


class Workspace(BuildHookInterface[WheelBuilderConfig]):
    """Adds to an editable install what a published wheel cannot say: where the checkout's other packages are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add a requirement for each environment, in editable installs only."""
        if version != "editable":
            return
        root = Path(self.root)
        for project in sorted(root.glob("environments/*/pyproject.toml")):
            build_data["dependencies"].append(requirement(project.parent, root / WHEELS))


def requirement(project: Path, wheels: Path) -> str:
    """Give the requirement by which the extra `dev` installs *project*.

    It names an editable wheel, built here: a requirement that named the folder would install a copy of the code.
    """
    builder = WheelBuilder(str(project))
    wheel = Path(next(builder.build(directory=str(wheels), versions=["editable"])))
    return f'{builder.metadata.core.raw_name} @ {wheel.as_uri()} ; extra == "dev"'
