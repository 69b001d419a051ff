"""What may come in: the memory of requests."""
