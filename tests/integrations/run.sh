#!/usr/bin/env sh
# Retrievers and stores inside real LangChain, LlamaIndex and Haystack, a client inside VectorDBBench, and the demo's
# embedder with its real weights, in an environment of their own (400 MB), made once. The last line says "ok" or "NOT
# VERIFIED"; the latter where the frameworks cannot be installed. A failing test fails.
. "$(dirname "$0")/../environment.sh"

install() {
  $pip install -c constraints.txt 'torch==2.13.0'
  $pip install -c constraints.txt langchain-core llama-index-core haystack-ai langchain-tests
  # Of VectorDBBench what measures; not the web page nor the clients of others.
  $pip install --no-deps vectordb-bench==2.0.0
  $pip install -c constraints.txt environs h5py hdrhistogram ir_datasets polars psutil pytz tqdm ujson
  # The demo's weights, which are read as data.
  $pip install --no-deps wordllama==0.4.0.post1
}

make_environment test-ecosystem "the frameworks" constraints.txt '.[device,test,langchain,llamaindex,haystack]'
# LangChain's own tests bring a plugin for asynchronous ones, which wants to be told how.
"$venv/bin/python" -m pytest -p no:cacheprovider -o asyncio_mode=auto -o asyncio_default_fixture_loop_scope=function \
  tests/integrations/test_langchain.py tests/integrations/test_langchain_store.py \
  tests/integrations/test_llamaindex.py tests/integrations/test_llamaindex_store.py \
  tests/integrations/test_haystack.py tests/integrations/test_haystack_store.py \
  tests/benchmarks/test_adapters.py \
  tests/rag/ingest/test_text_process.py::test_the_demos_embedder_with_its_tokens
echo "test-ecosystem: ok"
