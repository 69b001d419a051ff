"""The services of the service's tests, for its clients."""

from tests.service.conftest import index_path, make_service, planned_index, queries, service

__all__ = ["index_path", "make_service", "planned_index", "queries", "service"]
