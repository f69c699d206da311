"""Units of measure, and conversion between them."""

from __future__ import annotations

from typing import Literal, NamedTuple

Unit = Literal[
    "kilometres", "miles", "metres", "feet", "kilograms", "pounds", "litres", "gallons", "celsius", "fahrenheit"
]


class Scale(NamedTuple):
    """A unit of a *measure*. A value times *factor* plus *offset* is the value in the base unit of the measure."""

    measure: str
    factor: float
    offset: float = 0.0


SCALES: dict[Unit, Scale] = {
    "kilometres": Scale("length", 1000.0),
    "miles": Scale("length", 1609.344),
    "metres": Scale("length", 1.0),
    "feet": Scale("length", 0.3048),
    "kilograms": Scale("mass", 1.0),
    "pounds": Scale("mass", 0.45359237),
    "litres": Scale("volume", 1.0),
    "gallons": Scale("volume", 3.785411784),
    "celsius": Scale("temperature", 1.0),
    "fahrenheit": Scale("temperature", 5 / 9, -160 / 9),
}


def convert(value: float, source: Unit, target: Unit) -> float | None:
    """Convert *value* to *target*, rounded to two decimals, or return `None` if the units have different measures."""
    here, there = SCALES[source], SCALES[target]
    if here.measure != there.measure:
        return None
    return round((value * here.factor + here.offset - there.offset) / there.factor, 2)
