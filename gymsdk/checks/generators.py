"""The global random generators of the process: `random`, and those of numpy and torch if they are loaded."""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Generator:
    """The functions of a global generator. A state is any value."""

    get_state: Callable[[], Any]
    set_state: Callable[[Any], object]
    seed: Callable[[int], object]
    dump_state: Callable[[Any], bytes]


def get_generators() -> dict[str, Generator]:
    """Return the global generators of the loaded modules, by name.

    They are those that a seed of `random`, `numpy.random` or `torch` resets; the check loads none of the modules.
    """
    found = {"random": Generator(random.getstate, random.setstate, random.seed, pickle.dumps)}
    if (numpy := sys.modules.get("numpy")) is not None:
        # pickle writes the arrays of a state, and not only the position in them, which is the same after each seed.
        found["numpy.random"] = Generator(
            numpy.random.get_state, numpy.random.set_state, numpy.random.seed, pickle.dumps
        )
    if (torch := sys.modules.get("torch")) is not None and hasattr(torch, "get_rng_state"):
        found["torch"] = Generator(
            torch.get_rng_state, torch.set_rng_state, torch.manual_seed, lambda state: bytes(state.tolist())
        )
    return found


def read_generator_states() -> dict[str, object]:
    """Return the states of the global generators as bytes, by the words of a sentence."""
    return {
        f"the state of the global `{name}`": generator.dump_state(generator.get_state())
        for name, generator in get_generators().items()
    }


@contextmanager
def perturb_generators() -> Iterator[None]:
    """Seed the global generators at random, so that an episode that seeds them causes a visible change."""
    generators = [*get_generators().values()]
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.seed(int.from_bytes(os.urandom(4), "big"))
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
