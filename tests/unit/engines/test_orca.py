"""ORCA response headers as partial samples."""

from __future__ import annotations

import pytest

from tidegate.engines import orca


@pytest.mark.parametrize(
    "value",
    [
        b"TEXT named_metrics.kv_cache_usage_perc=0.4, named_metrics.num_requests_waiting=2.0",
        b'JSON {"named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 2.0}}',
        b"text  named_metrics.kv_cache_utilization=0.4,num_requests_waiting=2",
        b'JSON {"cpu": 0.1, "named_metrics": {"kv_cache_usage_perc": 0.4, "num_requests_waiting": 2, "x": 1}}',
    ],
)
def test_text_and_json_reports_are_read(value: bytes) -> None:
    sample = orca.sample("http://r", 5.0, value)
    assert sample is not None
    assert (sample.replica, sample.at_s, sample.kv_used_fraction, sample.waiting) == ("http://r", 5.0, 0.4, 2)
    assert sample.running is None
    assert sample.kv_capacity_tokens is None


def test_a_report_of_one_number_leaves_the_other_unknown() -> None:
    sample = orca.sample("http://r", 0.0, b"TEXT named_metrics.num_requests_waiting=3.0")
    assert sample is not None
    assert (sample.kv_used_fraction, sample.waiting) == (None, 3)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"TEXT",
        b"TEXT named_metrics.kv_cache_usage_perc=nan",
        b"TEXT named_metrics.kv_cache_usage_perc=-1",
        b"TEXT named_metrics.kv_cache_usage_perc=x",
        b"TEXT cpu=0.3",
        b"JSON {",
        b"JSON " + b"[" * 8000,
        b'JSON {"more": ' + b"[" * 8000,
        b'JSON {"named_metrics": 3}',
        b'JSON {"named_metrics": {"kv_cache_usage_perc": "0.4"}}',
        b"BIN abcd",
        b"TEXT named_metrics.num_requests_waiting=1," + b"x" * 9000,
    ],
)
def test_what_tells_nothing_is_no_sample(value: bytes) -> None:
    assert orca.sample("http://r", 0.0, value) is None


def test_asking_is_a_header_and_off_by_default() -> None:
    assert orca.request_header("off") is None
    assert orca.request_header("json") == (b"endpoint-load-metrics-format", b"JSON")
