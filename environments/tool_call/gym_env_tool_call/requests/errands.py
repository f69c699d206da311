"""Requests that ask for changes and no answer."""

from __future__ import annotations

from collections import Counter

from .drafts import (
    Draft,
    Kind,
    Scene,
    agenda,
    call,
    date,
    event,
    event_id,
    free,
    lookup,
    message,
    moment,
    named,
    people,
    person,
)
from .vocabulary import ERRANDS, NOTES, OUTINGS


def remind(scene: Scene) -> Draft:
    """Write a request for a reminder."""
    what, when, time = scene.rng.choice(ERRANDS), date(scene, earliest=1), moment(scene)
    texts = [
        f"Remind me {named(scene, when)} at {time} with the words {what!r}.",
        f"Set a reminder that says {what!r} for {time} {named(scene, when)}.",
    ]
    return Draft(scene.rng.choice(texts), [call("add_reminder", text=what, date=when, time=time)])


def jot(scene: Scene) -> Draft:
    """Write a request for a new note."""
    taken = {note.title for note in scene.world.records.notes}
    title = scene.rng.choice([each for each in NOTES if each not in taken])
    code = str(scene.rng.randint(10_000, 99_999))
    texts = [f"Write a note titled {title!r} that says {code!r}.", f"Note down {code!r} under the title {title!r}."]
    return Draft(scene.rng.choice(texts), [call("write_note", title=title, text=code)])


def forget(scene: Scene) -> Draft:
    """Write a request to delete a note."""
    title = scene.rng.choice(scene.world.records.notes).title
    return Draft(f"I no longer need my note {title!r}: delete it.", [call("delete_note", title=title)])


def schedule(scene: Scene) -> Draft:
    """Write a request for a new event."""
    title, when, minutes = scene.rng.choice(OUTINGS), date(scene, earliest=1), scene.rng.choice((30, 45, 60))
    start = free(scene, when, minutes)
    text = f"Put {title!r} into my calendar {named(scene, when)} at {start}, for {minutes} minutes, without a place."
    return Draft(text, [call("create_event", title=title, date=when, start=start, minutes=minutes)])


def tell(scene: Scene) -> Draft:
    """Write a request for a message."""
    who, what = person(scene), message(scene)
    texts = [f"Send {who.words} exactly this: {what!r}.", f"Text {who.words} the words {what!r}."]
    send = call("send_message", to=who.of(0, "phone"), text=what)
    return Draft(scene.rng.choice(texts), [lookup(who), send])


def cancel(scene: Scene) -> Draft:
    """Write a request to cancel an event."""
    chosen, index = event(scene)
    text = f"Cancel my {chosen.title} {named(scene, chosen.date)}."
    return Draft(text, [agenda(chosen), call("cancel_event", event_id=event_id(0, index))])


def move(scene: Scene) -> Draft:
    """Write a request to move an event."""
    chosen, index = event(scene)
    when = date(scene, earliest=1)
    start = free(scene, when, chosen.minutes)
    text = f"My {chosen.title} {named(scene, chosen.date)} has to move: put it at {start} {named(scene, when)}."
    return Draft(text, [agenda(chosen), call("move_event", event_id=event_id(0, index), date=when, start=start)])


def clear_day(scene: Scene) -> Draft:
    """Write a request to cancel all events of a day."""
    counted = Counter(each.date for each in scene.world.records.events)
    busiest = counted.most_common(1)[0][0]
    first = next(each for each in scene.world.records.events if each.date == busiest)
    text = f"I am ill {named(scene, busiest)}. Cancel everything in my calendar that day."
    gone = [call("cancel_event", event_id=event_id(0, index)) for index in range(counted[busiest])]
    return Draft(text, [agenda(first), *gone])


def tell_both(scene: Scene) -> Draft:
    """Write a request to send the same message to two people."""
    (one, other), what = people(scene), message(scene)
    text = f"Send both {one.words} and {other.words} this text, word for word: {what!r}."
    sends = [call("send_message", to=who.of(number, "phone"), text=what) for number, who in enumerate((one, other))]
    return Draft(text, [lookup(one), lookup(other), *sends])


CHORES = [Kind(write.__name__, 1, write) for write in (remind, jot)]
"""Requests that can be added to any other request: they do not conflict with it and ask for no answer."""

KINDS = [
    *CHORES,
    *(Kind(write.__name__, 1, write) for write in (forget, schedule)),
    *(Kind(write.__name__, 2, write) for write in (tell, cancel, move)),
    *(Kind(write.__name__, 3, write) for write in (clear_day,)),
    *(Kind(write.__name__, 4, write) for write in (tell_both,)),
]
