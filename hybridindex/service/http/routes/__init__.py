"""The routes: each parses a request, calls the service and writes its result."""
