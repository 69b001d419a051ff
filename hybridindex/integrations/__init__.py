"""hybridindex inside serving engines and frameworks.

``vllm.py`` fits vLLM's memory to a plan; ``vllm_endpoint.py`` serves the router from vLLM's API server;
``vllm_stats.py`` feeds it vLLM's measurements, through ``llm_load.py``. vLLM finds them by entry points. The others are
stores and retrievers for one framework each, with an extra each.
"""
