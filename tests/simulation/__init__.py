"""The product in a simulation: threads, clock, clients and faults drawn from a seed, on virtual time."""
