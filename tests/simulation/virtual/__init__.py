"""Threads, locks, queues, clocks and connections that a seed puts in order, on virtual time."""
