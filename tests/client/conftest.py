"""The services of the service's tests, for its clients."""

from tests.service.conftest import make_service, queries, service

__all__ = ["make_service", "queries", "service"]
