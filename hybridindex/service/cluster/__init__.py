"""The daemon as a node of a cluster."""
