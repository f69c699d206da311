"""Requests that ask for information and no changes."""

from __future__ import annotations

from .drafts import Draft, Kind, Scene, agenda, call, city, date, event, lookup, named, person


def weather(scene: Scene) -> Draft:
    """Write a request for a temperature."""
    where, when = city(scene), date(scene)
    words = named(scene, when)
    texts = [
        f"How many degrees Celsius will it be in {where} {words}?",
        f"I am in {where} {words}; what temperature should I dress for, in Celsius?",
    ]
    return Draft(scene.rng.choice(texts), [call("get_weather", city=where, date=when)], "{0.celsius}")


def exchange(scene: Scene) -> Draft:
    """Write a request for an amount in another currency."""
    source, target = scene.rng.sample(list(scene.world.rates), 2)
    amount = scene.rng.randint(20, 900) * 5
    texts = [
        f"What are {amount} {source} in {target} at today's rate, to two decimals?",
        f"I have to pay {amount} {source}. How many {target} is that today, to two decimals?",
    ]
    calls = [call("convert_currency", amount=amount, source=source, target=target)]
    return Draft(scene.rng.choice(texts), calls, "{0.amount}")


def distance(scene: Scene) -> Draft:
    """Write a request for the distance between two cities."""
    here, there = scene.rng.sample(list(scene.world.places), 2)
    text = f"How many kilometres is it from {here} to {there}, as the crow flies?"
    return Draft(text, [call("get_distance", origin=here, destination=there)], "{0.kilometres}")


def address(scene: Scene) -> Draft:
    """Write a request for the phone number or e-mail address of a person."""
    who = person(scene)
    key, words = scene.rng.choice([("phone", "phone number"), ("email", "e-mail address")])
    return Draft(f"I need the {words} of {who.words}.", [lookup(who)], who.of(0, key))


def recall(scene: Scene) -> Draft:
    """Write a request for the text of a note."""
    title = scene.rng.choice(scene.world.records.notes).title
    texts = [f"What did I note down under {title!r}?", f"I wrote a note called {title!r}. What does it say?"]
    return Draft(scene.rng.choice(texts), [call("find_notes", words=title)], "{0.notes.0.text}")


def fahrenheit(scene: Scene) -> Draft:
    """Write a request for a temperature in Fahrenheit."""
    where, when = city(scene), date(scene)
    text = f"What will the temperature be in {where} {named(scene, when)}, in degrees Fahrenheit?"
    convert = call("convert_units", value="{0.celsius}", source="celsius", target="fahrenheit")
    return Draft(text, [call("get_weather", city=where, date=when), convert], "{1.value}")


def miles(scene: Scene) -> Draft:
    """Write a request for a distance in miles."""
    here, there = scene.rng.sample(list(scene.world.places), 2)
    text = f"How many miles is it from {here} to {there}, as the crow flies? Give two decimals."
    convert = call("convert_units", value="{0.kilometres}", source="kilometres", target="miles")
    return Draft(text, [call("get_distance", origin=here, destination=there), convert], "{1.value}")


def weather_there(scene: Scene) -> Draft:
    """Write a request for the weather at the home of a person."""
    who, when = person(scene), date(scene)
    text = f"I am visiting {who.words} {named(scene, when)}. What temperature (Celsius) will it be where they live?"
    return Draft(text, [lookup(who), call("get_weather", city=who.of(0, "city"), date=when)], "{1.celsius}")


def weather_at(scene: Scene) -> Draft:
    """Write a request for the weather at an event."""
    chosen, index = event(scene)
    text = f"How warm will it be, in Celsius, where my {chosen.title} {named(scene, chosen.date)} takes place?"
    forecast = call("get_weather", city=f"{{0.events.{index}.place}}", date=chosen.date)
    return Draft(text, [agenda(chosen), forecast], "{1.celsius}")


def fahrenheit_at(scene: Scene) -> Draft:
    """Write a request for the weather at an event, in Fahrenheit."""
    chosen, index = event(scene)
    text = f"In degrees Fahrenheit, how warm will it be at my {chosen.title} {named(scene, chosen.date)}?"
    forecast = call("get_weather", city=f"{{0.events.{index}.place}}", date=chosen.date)
    convert = call("convert_units", value="{1.celsius}", source="celsius", target="fahrenheit")
    return Draft(text, [agenda(chosen), forecast, convert], "{2.value}")


def miles_to(scene: Scene) -> Draft:
    """Write a request for the distance to the home of a person, in miles."""
    who = person(scene)
    here = scene.rng.choice([place for place in scene.world.places if place != who.city])
    text = f"I am in {here}. How many miles away does {who.words} live, as the crow flies? Give two decimals."
    reach = call("get_distance", origin=here, destination=who.of(0, "city"))
    convert = call("convert_units", value="{1.kilometres}", source="kilometres", target="miles")
    return Draft(text, [lookup(who), reach, convert], "{2.value}")


KINDS = [
    *(Kind(write.__name__, 1, write) for write in (weather, exchange, distance, address, recall)),
    *(Kind(write.__name__, 2, write) for write in (fahrenheit, miles, weather_there, weather_at)),
    *(Kind(write.__name__, 3, write) for write in (fahrenheit_at, miles_to)),
]
