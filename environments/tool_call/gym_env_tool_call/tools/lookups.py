"""The tools that look something up and change nothing."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from gym_env_tool_call.rows import Request
from gym_env_tool_call.world import Place, Records, find_contacts, find_name

from .answers import JSON, error, join_names, wrong_day, wrong_text
from .units import Unit, convert

EARTH_KILOMETRES = 6371.0

City = Annotated[str, Field(description="The name of a city.")]
Currency = Annotated[str, Field(description="The three letters of a currency, for example EUR.")]


async def get_weather(
    city: City,
    task: Request,
    date: Annotated[str | None, Field(description="The day as YYYY-MM-DD; null for today.")] = None,
) -> JSON:
    """Get the weather forecast of a city for one day."""
    weather, date = task.world.weather, date or task.world.today
    if wrong := wrong_text("city", city) or wrong_day(date):
        return wrong
    if weather is None:
        return {"city": city, "weather_description": f"The weather in {city} is cold."}
    known = find_name(city, weather)
    if known is None:
        return error(f"there is no forecast for {city!r}; there is one for: {join_names(list(weather))}")
    forecast = weather[known].get(date)
    if forecast is None:
        return error(f"there is no forecast for {known} on {date}; there is one on: {join_names(list(weather[known]))}")
    description = f"The weather in {known} is {forecast.condition}."
    return {"city": known, "date": date, "weather_description": description, **forecast.model_dump()}


async def find_contact(
    name: Annotated[str, Field(description="A name, part of one, or what the user calls the person.")], task: Request
) -> JSON:
    """Find people in the address book, with their phone number, e-mail address and city."""
    found = find_contacts(task.world.contacts, name)
    if not found:
        names = join_names([contact.name for contact in task.world.contacts])
        return error(f"nobody in the address book goes by {name!r}; it holds: {names}")
    return {"contacts": [contact.model_dump() for contact in found]}


async def list_events(date: Annotated[str, Field(description="The day as YYYY-MM-DD.")], state: Records) -> JSON:
    """List the events in the calendar on one day, earliest first."""
    if wrong := wrong_day(date):
        return wrong
    found = sorted((event for event in state.events if event.date == date), key=lambda event: event.start)
    return {"date": date, "events": [event.model_dump(exclude={"date"}) for event in found]}


async def find_notes(
    words: Annotated[str, Field(description="Words to look for in the titles and texts.")], state: Records
) -> JSON:
    """Find the notes that hold every one of the words."""
    wanted = words.casefold().split()
    found = [note for note in state.notes if all(word in f"{note.title} {note.text}".casefold() for word in wanted)]
    if not found:
        return error(
            f"no note holds {words!r}; the notes are titled: {join_names([note.title for note in state.notes])}"
        )
    return {"notes": [note.model_dump() for note in found]}


async def convert_currency(
    amount: Annotated[float, Field(description="How much of the source currency.")],
    source: Currency,
    target: Currency,
    task: Request,
) -> JSON:
    """Convert an amount of money from one currency to another, at today's rate."""
    rates = task.world.rates
    codes = [find_name(code, rates) for code in (source, target)]
    here, there = codes
    if here is None or there is None:
        unknown = source if here is None else target
        return error(f"there is no rate for {unknown!r}; there is one for: {join_names(list(rates))}")
    value = round(amount / rates[here] * rates[there], 2)
    if not math.isfinite(value):
        return error("the amount is too large to convert; give a smaller one")
    return {"amount": value, "currency": there}


async def convert_units(
    value: Annotated[float, Field(description="How much of the source unit.")],
    source: Annotated[Unit, Field(description="The unit the value is in.")],
    target: Annotated[Unit, Field(description="The unit it is converted to.")],
) -> JSON:
    """Convert a value from one unit of measure to another."""
    result = convert(value, source, target)
    if result is None:
        return error(f"{source} cannot be converted to {target}; they measure different things")
    if not math.isfinite(result):
        return error("the value is too large to convert; give a smaller one")
    return {"value": result, "unit": target}


async def get_distance(origin: City, destination: City, task: Request) -> JSON:
    """Get the distance between two cities in kilometres, as the crow flies."""
    places = task.world.places
    here, there = find_name(origin, places), find_name(destination, places)
    if here is None or there is None:
        unknown = origin if here is None else destination
        return error(f"it is not known where {unknown!r} lies; known are: {join_names(list(places))}")
    return {"origin": here, "destination": there, "kilometres": _kilometres(places[here], places[there])}


def _kilometres(here: Place, there: Place) -> int:
    """Return the great-circle distance between two places, by the haversine formula."""
    north, south = math.radians(here.latitude), math.radians(there.latitude)
    across = math.radians(there.longitude - here.longitude)
    chord = math.sin((south - north) / 2) ** 2 + math.cos(north) * math.cos(south) * math.sin(across / 2) ** 2
    return round(2 * EARTH_KILOMETRES * math.asin(math.sqrt(min(1.0, chord))))
