"""What clients of OpenAI-compatible servers share: event streams. The clients are in ``rag`` and ``profiler``."""
