"""What the clients of OpenAI-compatible servers in ``rag`` and ``profiler`` share: event streams, models, refusals."""
