"""Several indexes in one daemon: which, who serves each, and what each gets of one budget of device bytes."""
