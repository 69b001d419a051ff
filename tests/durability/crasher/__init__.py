"""Processes that change an index until ``kill -9``, at any time, and what must be there afterwards."""
