"""Datasets: rows that a configuration names, with the agent and the environment they are for, and who plays them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gymsdk.errors import BadConfig, UsageError, suggestion

if TYPE_CHECKING:
    from gymsdk.configuration import Block, Dataset, Player
    from gymsdk.types import Model


@dataclass(frozen=True, slots=True)
class Chosen:
    """The rows at *path*, each played *repeats* times by *agent*: with *settings* of *environment*, and a *player*.

    *models* has the model servers that settings of the environment name. There is no *player* where the configuration
    names none.
    """

    path: Path
    repeats: int
    agent: str
    environment: str
    settings: Mapping[str, Any] = field(repr=False)
    models: Mapping[str, str]
    player: Player | None

    def build_model(self) -> Model | None:
        """Give the model that plays as the configuration says, `None` where it does not."""
        from gymsdk.models import registry as models

        return models.model(self.player.name, **self.player.options) if self.player else None

    def check_models(self) -> None:
        """Refuse to play here without a model server that the environment asks; raises `UsageError`."""
        for setting, server in self.models.items():
            raise UsageError(
                f"{self.environment} asks the model server {server!r} as its {setting}, and no server runs here; start "
                "them with `gymsdk serve --config FILE` and add --head URL, or name the model itself in the "
                f"configuration, as in {setting}: PROVIDER/NAME"
            )

    def describe_model(self) -> dict[str, Any]:
        """Give what a plan has to say of that model."""
        if self.player is None:
            return {}
        its = self.player.options
        return {
            "model": self.player.name,
            "base_url": ",".join(its.get("base_url", ())) or None,
            "api": its.get("api"),
            "pinned": dict(its.get("pinned", {})),
            "tokens": bool(its.get("tokens", False)),
        }


def asked_for(files: Sequence[Path], name: str | None, others: Mapping[str, object], *, played: bool = False) -> Chosen:
    """Give the dataset that a command asks for; *others* of its words say otherwise whose rows are meant.

    Where it is *played* by a model that the command names, the files need name none.
    """
    if name is None:
        raise UsageError("--config has the datasets of a configuration; name one with --dataset")
    if not files:
        raise UsageError(f"--dataset {name}: name the configuration that has it with --config")
    if taken := next((option for option, value in others.items() if value is not None), None):
        raise UsageError(f"--dataset {name} says which rows are meant, and whose they are; leave out {taken}")
    return chosen(files, name, played=played)


def chosen(files: Sequence[Path], name: str, *, played: bool = False) -> Chosen:
    """Give the dataset *name*, or `SERVER.NAME`, that *files* have; raises `UsageError`."""
    from gymsdk import configuration, topology

    deployment = configuration.read(files, played=played)
    for note in deployment.notes:
        typer.echo(note, err=True)
    blocks = {each.name: each for each in topology.whole(deployment)}
    block, dataset = _found(blocks.values(), name, files)
    if not dataset.path.is_file():
        raise BadConfig(
            f"{dataset.place}: dataset {name!r} is to be in {dataset.path}, and there is no such file;"
            " mend jsonl_fpath, or put the file there"
        )
    agent = _agent(block, blocks)
    resources = blocks.get(agent.refers.get(topology.RESOURCES_REF, ""))
    if resources is None:
        raise BadConfig(f"{agent.place}: {agent.name} names no resources_server, whose environment is to be played")
    return Chosen(
        path=dataset.path,
        repeats=dataset.repeats,
        agent=agent.name,
        environment=getattr(resources.part, "environment", resources.implementation),
        settings=resources.settings,
        models=resources.models,
        player=_player(agent, blocks),
    )


def _found(blocks: Iterable[Block], name: str, files: Sequence[Path]) -> tuple[Block, Dataset]:
    known = [(block, each) for block in blocks for each in block.datasets]
    found = [each for each in known if name in {each[1].name, _whole(*each)}]
    if len(found) == 1:
        return found[0]
    if found:
        several = " and ".join(_whole(*each) for each in found)
        raise UsageError(f"--dataset {name}: there are {several}; write one of them so")
    called = [each.name for _, each in known]
    names = [each.name if called.count(each.name) == 1 else _whole(block, each) for block, each in known]
    told = ", ".join(map(str, files)) or "the configuration"
    near = suggestion(name, names, f"there are {', '.join(names)}") if names else "; a server lists its in `datasets`"
    raise UsageError(f"--dataset {name}: {told} has no such dataset{near}")


def _whole(block: Block, dataset: Dataset) -> str:
    """Give what *dataset* is called where others have its name."""
    return f"{block.name}.{dataset.name}"


def _agent(block: Block, blocks: Mapping[str, Block]) -> Block:
    """Give the agent that plays the rows of *block*: itself, or the one that refers to it."""
    from gymsdk.topology import AGENT_REF, RESOURCES_REF

    if block.kind == "environment_servers":
        return blocks[block.refers[AGENT_REF]]
    if block.kind == "resources_servers":
        agents = (each for each in blocks.values() if each.kind == "responses_api_agents")
        return next(each for each in agents if each.refers.get(RESOURCES_REF) == block.name)
    return block


def _player(agent: Block, blocks: Mapping[str, Block]) -> Player | None:
    from gymsdk.configuration import Player
    from gymsdk.topology import MODEL_REF

    model = blocks.get(agent.refers.get(MODEL_REF, ""))
    return model.part if model is not None and isinstance(model.part, Player) else None
