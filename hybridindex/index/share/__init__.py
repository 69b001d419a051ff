"""Shares: sparse copies of an index that hold some of its lists. What a node of a cluster serves from."""
