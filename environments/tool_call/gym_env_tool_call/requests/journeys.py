"""Requests whose changes depend on information that the assistant must look up."""

from __future__ import annotations

from gym_env_tool_call.rows import Call
from gym_env_tool_call.world import Forecast

from .drafts import (
    Draft,
    Kind,
    Scene,
    agenda,
    call,
    city,
    date,
    event,
    event_id,
    free,
    lookup,
    moment,
    named,
    people,
    person,
)
from .vocabulary import ERRANDS, OUTINGS


def _day_with(scene: Scene, *, rain: bool) -> tuple[str, str]:
    """Choose a city and a day with or without rain."""
    weather: dict[str, dict[str, Forecast]] = scene.world.weather or {}
    fits = [
        (where, when)
        for where, days in weather.items()
        for when, forecast in days.items()
        if (forecast.condition == "rainy") is rain and when > scene.world.today
    ]
    return scene.rng.choice(fits)


def _if_rainy(scene: Scene, *, rain: bool) -> Draft:
    where, when = _day_with(scene, rain=rain)
    time = moment(scene)
    text = (
        f"How many degrees Celsius will it be in {where} {named(scene, when)}? And only if the forecast there is rainy,"
        f" set a reminder for {time} that day that says 'take an umbrella'."
    )
    remind = [call("add_reminder", text="take an umbrella", date=when, time=time)] if rain else []
    return Draft(text, [call("get_weather", city=where, date=when), *remind], "{0.celsius}")


def stay_dry(scene: Scene) -> Draft:
    """Write a request to do something only in rain, on a day without any."""
    return _if_rainy(scene, rain=False)


def umbrella(scene: Scene) -> Draft:
    """Write a request to do something only in rain, on a rainy day."""
    return _if_rainy(scene, rain=True)


def price(scene: Scene) -> Draft:
    """Write a request to note an amount in another currency, and to answer with it."""
    source, target = scene.rng.sample(list(scene.world.rates), 2)
    amount = scene.rng.randint(20, 900) * 5
    text = (
        f"What are {amount} {source} in {target}, to two decimals?"
        f" Note it down as well: title 'Price in {target}', text like '12.50 {target}'."
    )
    convert = call("convert_currency", amount=amount, source=source, target=target)
    note = call("write_note", title=f"Price in {target}", text=f"{{0.amount}} {target}")
    return Draft(text, [convert, note], "{0.amount}")


def pack(scene: Scene) -> Draft:
    """Write a request for a reminder of the weather at an event."""
    (chosen, index), time = event(scene), moment(scene)
    text = (
        f"Set a reminder for {time} on the day of my {chosen.title} ({named(scene, chosen.date)}) that tells the"
        " weather where it takes place, worded like 'sunny, 21 degrees' (Celsius)."
    )
    forecast = call("get_weather", city=f"{{0.events.{index}.place}}", date=chosen.date)
    remind = call("add_reminder", text="{1.condition}, {1.celsius} degrees", date=chosen.date, time=time)
    return Draft(text, [agenda(chosen), forecast, remind])


def report(scene: Scene) -> Draft:
    """Write a request to send a person the weather at their home."""
    who, when = person(scene), date(scene)
    text = (
        f"Text {who.words} what the weather will be {named(scene, when)} in the city they live in,"
        " worded like 'Rome: sunny, 21 degrees' (Celsius)."
    )
    forecast = call("get_weather", city=who.of(0, "city"), date=when)
    send = call("send_message", to=who.of(0, "phone"), text="{1.city}: {1.condition}, {1.celsius} degrees")
    return Draft(text, [lookup(who), forecast, send])


def invite(scene: Scene) -> Draft:
    """Write a request to create an event in the city of a person, and to send them a message."""
    who, when, minutes = person(scene), date(scene, earliest=1), scene.rng.choice((30, 45, 60))
    title, start = scene.rng.choice(OUTINGS), free(scene, when, minutes)
    text = (
        f"Put {title!r} into my calendar {named(scene, when)} at {start}, for {minutes} minutes; the place is the city"
        f" {who.words} lives in. Then text them exactly: '{title} at {start}'."
    )
    arrange = {"title": title, "date": when, "start": start, "minutes": minutes, "place": who.of(0, "city")}
    send = call("send_message", to=who.of(0, "phone"), text=f"{title} at {start}")
    return Draft(text, [lookup(who), call("create_event", **arrange), send])


def warn(scene: Scene) -> Draft:
    """Write a request to send a person the weather at an event, and to answer with it."""
    who, (chosen, index) = person(scene), event(scene)
    text = (
        f"What temperature (Celsius) will it be where my {chosen.title} {named(scene, chosen.date)} takes place?"
        f" Text the city and the temperature to {who.words} as well, worded like 'Rome, 21 degrees'."
    )
    forecast = call("get_weather", city=f"{{1.events.{index}.place}}", date=chosen.date)
    send = call("send_message", to=who.of(0, "phone"), text="{2.city}, {2.celsius} degrees")
    return Draft(text, [lookup(who), agenda(chosen), forecast, send], "{2.celsius}")


def compare(scene: Scene) -> Draft:
    """Write a request to send a person the weather of two cities."""
    who, when = person(scene), date(scene)
    here, there = scene.rng.sample(list(scene.world.places), 2)
    text = (
        f"Text {who.words} the temperatures in {here} and {there} {named(scene, when)}, in that order and worded like"
        " 'Rome 21, Paris 17' (Celsius)."
    )
    forecasts = [call("get_weather", city=each, date=when) for each in (here, there)]
    send = call("send_message", to=who.of(0, "phone"), text="{1.city} {1.celsius}, {2.city} {2.celsius}")
    return Draft(text, [lookup(who), *forecasts, send])


def _postponed(scene: Scene) -> tuple[str, list[Call]]:
    """Build a request to move an event and send a message about it."""
    who, (chosen, index) = person(scene), event(scene)
    when = date(scene, earliest=1)
    start = free(scene, when, chosen.minutes)
    news = f"{chosen.title} is now at {start}"
    text = (
        f"My {chosen.title} {named(scene, chosen.date)} has to move: put it at {start} {named(scene, when)},"
        f" and text {who.words} exactly: {news!r}."
    )
    shift = call("move_event", event_id=event_id(0, index), date=when, start=start)
    send = call("send_message", to=who.of(1, "phone"), text=news)
    return text, [agenda(chosen), lookup(who), shift, send]


def postpone(scene: Scene) -> Draft:
    """Write a request to move an event and send a message about it."""
    return Draft(*_postponed(scene))


def postpone_and_remind(scene: Scene) -> Draft:
    """Write a request to move an event, send a message about it, and set a reminder."""
    text, calls = _postponed(scene)
    when, time = date(scene, earliest=1), moment(scene)
    what = scene.rng.choice(ERRANDS)
    remind = call("add_reminder", text=what, date=when, time=time)
    return Draft(f"{text} And remind me {named(scene, when)} at {time}: {what!r}.", [*calls, remind])


def brief(scene: Scene) -> Draft:
    """Write a request to send a person the weather at an event in Fahrenheit, and to answer with it."""
    who, (chosen, index) = person(scene), event(scene)
    text = (
        f"How warm will it be at my {chosen.title} {named(scene, chosen.date)}, in degrees Fahrenheit? Text the city"
        f" and that figure to {who.words} too, worded like 'Rome, 69.8 F'."
    )
    forecast = call("get_weather", city=f"{{1.events.{index}.place}}", date=chosen.date)
    convert = call("convert_units", value="{2.celsius}", source="celsius", target="fahrenheit")
    send = call("send_message", to=who.of(0, "phone"), text="{2.city}, {3.value} F")
    return Draft(text, [lookup(who), agenda(chosen), forecast, convert, send], "{3.value}")


def broadcast(scene: Scene) -> Draft:
    """Write a request to send two people the weather of a city."""
    (one, other), where, when = people(scene), city(scene), date(scene)
    text = (
        f"Text both {one.words} and {other.words} what the weather in {where} will be {named(scene, when)},"
        " worded like 'sunny, 21 degrees' (Celsius)."
    )
    sends = [
        call("send_message", to=who.of(number, "phone"), text="{2.condition}, {2.celsius} degrees")
        for number, who in enumerate((one, other))
    ]
    return Draft(text, [lookup(one), lookup(other), call("get_weather", city=where, date=when), *sends])


KINDS = [
    *(Kind(write.__name__, 1, write) for write in (stay_dry,)),
    *(Kind(write.__name__, 2, write) for write in (umbrella, price)),
    *(Kind(write.__name__, 3, write) for write in (pack, report, invite)),
    *(Kind(write.__name__, 4, write) for write in (warn, compare, postpone)),
    *(Kind(write.__name__, 5, write) for write in (postpone_and_remind, brief, broadcast)),
]
