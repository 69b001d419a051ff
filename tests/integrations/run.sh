#!/usr/bin/env sh
# The retrievers inside real LangChain, LlamaIndex and Haystack, in an environment of their own (400 MB), made once. The
# last line says "ok" or "NOT VERIFIED"; the latter where the frameworks cannot be installed, which is no failure of
# ours. A failing test fails.
set -eu
PYTHON=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
venv=$1
log="$venv.log"
stamp="$venv/.installed"

install() {
  rm -rf "$venv"
  "$PYTHON" -m venv "$venv"
  pip="$venv/bin/python -m pip --disable-pip-version-check -q"
  $pip install -c constraints.txt 'torch==2.13.0'
  $pip install -c constraints.txt langchain-core llama-index-core haystack-ai
}

mkdir -p "$(dirname "$venv")"
if [ ! -e "$stamp" ] || [ constraints.txt -nt "$stamp" ] || [ "$0" -nt "$stamp" ]; then
  # In a shell of its own: "set -e" does not hold inside a condition.
  status=0
  (set -e; install) > "$log" 2>&1 & wait $! || status=$?
  if [ "$status" -ne 0 ]; then
    tail -n 5 "$log"
    echo "test-ecosystem: NOT VERIFIED: the frameworks cannot be installed here (see $log)"
    exit 0
  fi
  touch "$stamp"
fi
# Ours must build: from here on, what fails is a failure. Python files are read where they are.
ours="$venv/.ours"
if [ ! -e "$ours" ] || [ -n "$(find pyproject.toml CMakeLists.txt hybridindex/native -newer "$ours")" ]; then
  "$venv/bin/python" -m pip --disable-pip-version-check -q install -c constraints.txt \
    -e '.[device,test,langchain,llamaindex,haystack]'
  touch "$ours"
fi
"$venv/bin/python" -m pytest -p no:cacheprovider tests/integrations/test_langchain.py \
  tests/integrations/test_llamaindex.py tests/integrations/test_haystack.py
echo "test-ecosystem: ok"
