"""Builders of node registrations for tests of the head."""

from __future__ import annotations

from gymsdk.servers.reports import Exit, Registration
from gymsdk.servers.service import Service

MATH = Service(name="math", kind="resources_servers", implementation="math", port=1, started=5.0)
HERE = "10.0.0.7"


def said(*services, **fields):
    return Registration(services=list(services), **fields)


def another(service=MATH, **fields):
    return Service.model_validate(service.model_dump(exclude={"id"}) | fields)


def ended(pid=7, at=6.0):
    return said(exits={"math": Exit(code=-9, at=at, pid=pid)}, supervisor="s")
