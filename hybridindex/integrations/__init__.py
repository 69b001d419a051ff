"""hybridindex inside other frameworks. Each module needs its own extra, and says so where that is not installed."""
