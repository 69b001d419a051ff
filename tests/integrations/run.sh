#!/usr/bin/env sh
# The retrievers inside real LangChain, LlamaIndex and Haystack, in an environment of their own (400 MB), made once. The
# last line says "ok" or "NOT VERIFIED"; the latter where the frameworks cannot be installed. A failing test fails.
. "$(dirname "$0")/../environment.sh"

install() {
  $pip install -c constraints.txt 'torch==2.13.0'
  $pip install -c constraints.txt langchain-core llama-index-core haystack-ai
}

make_environment test-ecosystem "the frameworks" constraints.txt '.[device,test,langchain,llamaindex,haystack]'
"$venv/bin/python" -m pytest -p no:cacheprovider tests/integrations/test_langchain.py \
  tests/integrations/test_llamaindex.py tests/integrations/test_haystack.py
echo "test-ecosystem: ok"
