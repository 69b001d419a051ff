"""Scans that other nodes of a cluster ask for."""
