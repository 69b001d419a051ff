"""Commands of several machines."""
