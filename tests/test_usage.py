from __future__ import annotations

import pytest

from gymsdk.episode import StageTimer
from gymsdk.responses import UsageByRole, add_usage, build_usage, parse_usage, record_usage, usage_to_item
from gymsdk.types import Usage

CALL = {"usage": build_usage(10, 5, cached_tokens=4, reasoning_tokens=2)}


def test_usage_is_read_from_a_response():
    assert parse_usage(CALL) == Usage(
        input_tokens=10, output_tokens=5, total_tokens=15, cached_tokens=4, reasoning_tokens=2, calls=1
    )


@pytest.mark.parametrize("reported", [None, {}, "many", {"input_tokens": "ten", "input_tokens_details": 3}])
def test_a_response_without_readable_usage_counts_as_a_call(reported):
    assert parse_usage({"usage": reported}) == Usage(calls=1)


def test_calls_are_summed():
    total = add_usage(parse_usage(CALL), parse_usage(CALL))
    assert (total.input_tokens, total.total_tokens, total.cached_tokens, total.calls) == (20, 30, 8, 2)


def test_a_detail_that_one_call_lacks_is_unknown_in_the_sum():
    total = add_usage(parse_usage(CALL), parse_usage({"usage": build_usage(1, 1)}))
    assert total.cached_tokens is None
    assert total.input_tokens == 11


def test_no_calls_add_nothing():
    assert add_usage(Usage(), parse_usage(CALL)) == parse_usage(CALL) == add_usage(parse_usage(CALL), Usage())


def test_usage_inside_a_block_is_recorded_by_role():
    used: UsageByRole = {}
    with StageTimer(used, {}, "verify"):
        for role in ("policy", "judge", "policy"):
            record_usage(role, CALL)
    assert {role: each.calls for role, each in used.items()} == {"policy": 2, "judge": 1}


def test_usage_outside_a_block_is_not_recorded():
    used: UsageByRole = {}
    with StageTimer(used, {}, "verify"):
        pass
    record_usage("policy", CALL)
    assert used == {}


def test_a_sum_has_the_format_of_response_usage():
    assert usage_to_item(parse_usage(CALL)) == CALL["usage"]
