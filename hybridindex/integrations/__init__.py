"""Where hybridindex meets serving engines. The engine finds these modules by entry points; nothing here imports it.

``vllm.py`` fits vLLM's memory to a plan; ``vllm_endpoint.py`` serves the router from vLLM's API server;
``vllm_stats.py`` feeds it vLLM's measurements, through ``llm_load.py``.
"""
