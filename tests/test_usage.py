from __future__ import annotations

import pytest

from gymsdk.episode import StageTimer
from gymsdk.responses import UsageByRole, add_usage, build_usage, parse_usage, record_usage, usage_to_item
from gymsdk.types import Usage

CALL = {"usage": build_usage(10, 5, cached_tokens=4, reasoning_tokens=2)}


def test_usage_is_read_from_a_response_and_has_its_format_again():
    usage = parse_usage(CALL)
    counts = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 15, "cached_tokens": 4, "reasoning_tokens": 2}
    assert (usage, usage_to_item(usage)) == (Usage(calls=1, **counts), CALL["usage"])


@pytest.mark.parametrize("reported", [None, {}, "many", {"input_tokens": "ten", "input_tokens_details": 3}])
def test_a_response_without_readable_usage_counts_as_a_call(reported):
    assert parse_usage({"usage": reported}) == Usage(calls=1)


def test_calls_are_summed():
    one = parse_usage(CALL)
    total = add_usage(one, one)
    assert (total.input_tokens, total.total_tokens, total.cached_tokens, total.calls) == (20, 30, 8, 2)
    assert add_usage(Usage(), one) == one == add_usage(one, Usage())
    # A detail that one call lacks is unknown in the sum.
    total = add_usage(one, parse_usage({"usage": build_usage(1, 1)}))
    assert (total.cached_tokens, total.input_tokens) == (None, 11)


def test_usage_inside_a_block_is_recorded_by_role():
    used: UsageByRole = {}
    with StageTimer(used, {}, "verify"):
        for role in ("policy", "judge", "policy"):
            record_usage(role, CALL)
    record_usage("policy", CALL)
    assert {role: usage.calls for role, usage in used.items()} == {"policy": 2, "judge": 1}
