"""The builds of a wheel: a published one carries the template, an editable one's extra `dev` what lies beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.builders.wheel import WheelBuilder, WheelBuilderConfig

WHEELS = Path("build", "editable")
"""Where their editable wheels are built; pip installs them from there."""


TEMPLATE = Path("cookiecutter-env")
"""The template of a new environment, which `gymsdk new` fills in."""

BESIDE = ("environments/*", "compat")
"""The other distributions of the checkout."""


class Workspace(BuildHookInterface[WheelBuilderConfig]):
    """Adds what lies beside the package: to a published wheel as a copy, to an editable install by where it is."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the template to a published wheel, a requirement for each other distribution to an editable one."""
        root = Path(self.root)
        if version != "editable":
            build_data["force_include"][str(root / TEMPLATE)] = "gymsdk/template"
            return
        for project in sorted(each for beside in BESIDE for each in root.glob(f"{beside}/pyproject.toml")):
            build_data["dependencies"].append(requirement(project.parent, root / WHEELS))


def requirement(project: Path, wheels: Path) -> str:
    """Give the requirement by which the extra `dev` installs *project*.

    It names an editable wheel, built here: a requirement that named the folder would install a copy of the code.
    """
    builder = WheelBuilder(str(project))
    wheel = Path(next(builder.build(directory=str(wheels), versions=["editable"])))
    return f'{builder.metadata.core.raw_name} @ {wheel.as_uri()} ; extra == "dev"'
