"""Configuration is refused by field and value before anything is opened."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybridindex.errors import InvalidInputError
from hybridindex.service.config import Limits, ServiceConfig, is_loopback


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_body_bytes", 10),
        ("max_k", 0),
        ("max_k", 2049),
        ("max_nprobe", 0),
        ("max_queries", True),
        ("max_answer_rows", 0),
        ("max_sessions", -1),
        ("session_ttl_s", 0),
        ("session_ttl_s", float("nan")),
        ("queue_queries", 0),
        ("client_share", 1.5),
        ("in_flight_queries", "many"),
        ("default_deadline_ms", -1.0),
        ("overload_min_nprobe", 0),
        ("client_timeout_s", float("inf")),
    ],
)
def test_limits_name_the_field_and_its_value(field, value):
    with pytest.raises(InvalidInputError, match=rf"^{field} is .*expected"):
        Limits(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 65_536),
        ("port", "8080"),
        ("uds", "/tmp/socket"),
        ("uds", Path("/tmp") / ("x" * 108)),
        ("plan", "newest"),
        ("slo_ms", 0),
        ("log_format", "xml"),
        ("drain_timeout_s", -1),
    ],
)
def test_fields_are_checked(field, value):
    with pytest.raises(InvalidInputError, match=f"^{field} "):
        ServiceConfig(**{field: value})


def test_nowhere_to_listen_is_refused():
    with pytest.raises(InvalidInputError, match="host and uds are both missing"):
        ServiceConfig(host=None)


def test_half_of_tls_is_refused():
    with pytest.raises(InvalidInputError, match=r"^tls_key is missing"):
        ServiceConfig(tls_cert=Path("cert.pem"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_beyond_loopback_needs_keys(host):
    assert not is_loopback(host)
    with pytest.raises(InvalidInputError, match="key_file is missing"):
        ServiceConfig(host=host)
    assert ServiceConfig(host=host, key_file=Path("keys.json")).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_none(host):
    assert ServiceConfig(host=host).key_file is None
