"""Builders of node registrations for tests of the head."""

from __future__ import annotations

from gymsdk.cluster.reports import Exit, Registration, Service

MATH = Service(name="math", kind="resources_servers", implementation="math", port=1, started=5.0)
LAMP = Service(name="lamp", kind="resources_servers", implementation="lamp", port=9)
HERE = "10.0.0.7"


def build_registration(*services, **fields):
    return Registration(services=list(services), **fields)


def build_service(service=MATH, **fields):
    return Service.model_validate(service.model_dump(exclude={"id"}) | fields)


def build_exit_registration(pid=7, at=6.0):
    return build_registration(exits={"math": Exit(code=-9, at=at, pid=pid)}, supervisor="s")
