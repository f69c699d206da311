"""The words and numbers for generated worlds."""

from __future__ import annotations

from typing import get_args

from gym_env_tool_call.world import Condition


def phrases(text: str) -> tuple[str, ...]:
    """Split *text* at commas."""
    return tuple(text.split(","))


CONDITIONS: tuple[str, ...] = get_args(Condition)

CITIES = {
    "Oslo": (59.9, 10.8),
    "Lisbon": (38.7, -9.1),
    "Vienna": (48.2, 16.4),
    "Dublin": (53.3, -6.3),
    "Helsinki": (60.2, 24.9),
    "Athens": (38.0, 23.7),
    "Prague": (50.1, 14.4),
    "Porto": (41.1, -8.6),
    "Krakow": (50.1, 19.9),
    "Bergen": (60.4, 5.3),
    "Seville": (37.4, -6.0),
    "Turin": (45.1, 7.7),
    "Nairobi": (-1.3, 36.8),
    "Lima": (-12.0, -77.0),
    "Quito": (-0.2, -78.5),
    "Hanoi": (21.0, 105.8),
    "Osaka": (34.7, 135.5),
    "Perth": (-31.9, 115.9),
    "Montreal": (45.5, -73.6),
    "Denver": (39.7, -105.0),
    "Tunis": (36.8, 10.2),
    "Accra": (5.6, -0.2),
    "Tbilisi": (41.7, 44.8),
    "Reykjavik": (64.1, -21.9),
}

CURRENCIES = {"EUR": 1.0, "USD": 1.09, "GBP": 0.85, "NOK": 11.6, "JPY": 163.0, "CHF": 0.95, "PLN": 4.3, "KES": 141.0}

FIRST_NAMES = phrases(
    "Anna,Bruno,Carla,Dmitri,Elena,Farid,Grace,Hugo,Ines,Jonas,Kofi,Lucia,Mateo,Nadia,Oscar,Paula,Quentin,"
    "Rosa,Stefan,Tara,Umar,Vera,Walter,Ximena,Yusuf,Zoe"
)

LAST_NAMES = phrases(
    "Abebe,Berg,Castro,Dahl,Eriksen,Fischer,Garcia,Haddad,Ito,Jansen,Kovacs,Larsen,Mensah,Novak,Okafor,"
    "Petrov,Quinn,Rossi,Santos,Takeda,Usman,Varga,Weber,Yilmaz,Zhang"
)

RELATIONS = ("dentist", "landlord", "sister", "brother", "accountant", "coach", "neighbour", "plumber", "mentor")

EVENTS = phrases(
    "Budget review,Sprint planning,Book club,Piano lesson,Team lunch,Design workshop,Board meeting,Yoga class,"
    "Client call,Job interview,Chess evening,Parents evening,Site visit,Contract signing,Choir rehearsal,Poster session"
)

NOTES = phrases(
    "Wifi code,Locker code,Bike lock,Alarm code,Booking reference,Membership number,Gate code,Parcel number,Safe code"
)

ERRANDS = phrases(
    "water the plants,renew the passport,pay the rent,pick up the parcel,call the bank,book the ferry,feed the cat,"
    "return the library books,charge the camera,buy stamps,post the contract,order new filters,back up the laptop,"
    "hand in the tax form,defrost the freezer,collect the keys,check the tyres,print the tickets"
)

TEXTS = phrases(
    "Running ten minutes late,The keys are under the mat,See you at the station,The parcel arrived,Happy birthday,"
    "Please call me back,I booked the table,The meeting room changed,Thanks for yesterday,The contract is signed,"
    "Bring the blue folder,The train was cancelled,I will be there at noon,Can we talk tomorrow"
    ",The tickets are sold out"
)

OUTINGS = phrases(
    "Tennis,Swimming,Museum visit,Haircut,Car service,Eye test,Picnic,Coffee with Sam,Guitar practice,Garden work,"
    "Flat viewing,Cooking course,Film night,Vet appointment,Blood donation"
)
