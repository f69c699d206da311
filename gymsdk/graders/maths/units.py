"""Units of measure and of money: their names, and the factors that convert them."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

MAX_UNIT_POWER = 12


class Unit(NamedTuple):
    """A unit: a factor to the base units, and the powers of these.

    An unknown word, such as "apples", is a separate base unit.
    """

    factor: Fraction
    powers: tuple[tuple[str, int], ...]

    def __mul__(self, other: object) -> Unit:
        if not isinstance(other, Unit):
            return NotImplemented
        powers = dict(self.powers)
        for base, power in other.powers:
            powers[base] = powers.get(base, 0) + power
        return Unit(self.factor * other.factor, tuple(sorted((base, n) for base, n in powers.items() if n)))

    def raise_to(self, power: int) -> Unit:
        """Return the unit to an integer power, of at most `MAX_UNIT_POWER`."""
        if abs(power) > MAX_UNIT_POWER:
            raise ValueError("the power of the unit is too large")
        return Unit(self.factor**power, tuple((base, n * power) for base, n in self.powers if power))

    @property
    def is_count(self) -> bool:
        """Whether it only names counted things, such as "apples"."""
        return all(power == 1 and base not in _BASES for base, power in self.powers)


NO_UNIT = Unit(Fraction(1), ())
_BASES = {
    "m",
    "kg",
    "s",
    "A",
    "K",
    "celsius",
    "fahrenheit",
    "bit",
    "USD",
    "EUR",
    "GBP",
    "JPY",
    "INR",
    "deg",
    "rad",
    "V",
    "ohm",
    "mol",
    "cal",
}

# Each line: a base unit with its power, and the units with the factor and the names.
_MEASURES: dict[str, dict[str, str]] = {
    "m": {
        "1": "m meter metre",
        "1/100": "cm centimeter centimetre",
        "1/1000": "mm millimeter millimetre",
        "1/10": "dm decimeter decimetre",
        "1000": "km kilometer kilometre",
        "1/1000000": "micrometer micrometre",
        "1/1000000000": "nm nanometer nanometre",
        "127/5000": "in inch",
        "381/1250": "ft foot",
        "1143/1250": "yd yard",
        "201168/125": "mi mile",
    },
    "m3": {"1/1000": "l L liter litre", "1/1000000": "ml mL milliliter millilitre", "473176473/125000000000": "gallon"},
    "m2": {"10000": "hectare ha", "316160658/78125": "acre"},
    "kg": {
        "1": "kg kilogram kilogramme",
        "1/1000": "g gram gramme",
        "1/1000000": "mg milligram",
        "1000": "tonne",
        "45359237/100000000": "lb pound",
        "45359237/1600000000": "oz ounce",
    },
    "s": {
        "1": "s sec second",
        "60": "min minute",
        "3600": "h hr hour",
        "86400": "day",
        "604800": "week",
        "1/1000": "ms millisecond",
    },
    "month": {"1": "month", "12": "yr year"},
    "A": {"1": "A ampere amp"},
    "K": {"1": "K kelvin"},
    "celsius": {"1": "celsius"},
    "fahrenheit": {"1": "fahrenheit"},
    "bit": {"1": "bit", "8": "byte"},
    "USD": {"1": "USD dollar buck", "1/100": "cent penny"},
    "EUR": {"1": "EUR euro"},
    "GBP": {"1": "GBP", "1/100": "pence"},
    "JPY": {"1": "JPY yen"},
    "INR": {"1": "INR rupee"},
    "deg": {"1": "deg degree"},
    "V": {"1": "V volt"},
    "ohm": {"1": "ohm \\Omega"},
    "mol": {"1": "mol mole"},
    "cal": {"1": "cal calorie", "1000": "kcal kilocalorie"},
    "rad": {"1": "rad radian"},
}
_BASES.add("month")
_DERIVED: dict[str, dict[str, int]] = {
    "N newton": {"kg": 1, "m": 1, "s": -2},
    "J joule": {"kg": 1, "m": 2, "s": -2},
    "W watt": {"kg": 1, "m": 2, "s": -3},
    "Pa pascal": {"kg": 1, "m": -1, "s": -2},
    "Hz hertz": {"s": -1},
    "mph": {"mi": 1, "h": -1},
    "kph kmh": {"km": 1, "h": -1},
}
_IRREGULAR = {"feet": "foot", "inches": "inch", "pennies": "penny", "people": "person"}
PRODUCTS = {"mg"}
"""Symbols of units that are rather a product in a formula: the mass times the acceleration of gravity."""

AMBIGUOUS_NAMES = {"in", "a", "as", "at", "to", "or", "and", "min", "deg", "ha"}
"""Names of units that are also other words or functions."""

_UNITS: dict[str, Unit] = {}


def _fill() -> None:
    for base, units in _MEASURES.items():
        name, power = (base[0], int(base[1])) if base[-1].isdigit() else (base, 1)
        for factor, names in units.items():
            _UNITS.update(dict.fromkeys(names.split(), Unit(Fraction(factor), ((name, power),))))
    for names, parts in _DERIVED.items():
        unit = NO_UNIT
        for name, power in parts.items():
            unit = unit * _UNITS[name].raise_to(power)
        _UNITS.update(dict.fromkeys(names.split(), unit))


_fill()


def find_unit(word: str) -> Unit | None:
    """Return the unit with this name or symbol, in the singular or plural, or `None`."""
    found = _UNITS.get(word)
    if found is None and len(word) > 2:  # noqa: PLR2004 -- symbols have capital letters that matter, and no plural
        found = _UNITS.get(singularise(word.lower()))
    return found


def singularise(word: str) -> str:
    """Return an English noun in the singular, as far as a rule of spelling can say."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    for ending, singular in (("ies", "y"), ("ches", "ch"), ("shes", "sh"), ("sses", "ss"), ("xes", "x"), ("s", "")):
        if word.endswith(ending) and len(word) > len(ending) + 1 and not word.endswith(("ss", "us")):
            return word[: -len(ending)] + singular
    return word


def label(word: str) -> Unit:
    """Return an unknown word as a separate base unit."""
    return Unit(Fraction(1), ((singularise(word.lower()), 1),))
