#!/usr/bin/env sh
# neon.sh FOLDER: builds the native sources for 64-bit Arm below FOLDER and runs them in an emulator: kernels_agree as on a
# CPU with dot products and as on one without, then the fuzz target. Where a tool is missing it says NOT VERIFIED; it
# installs none.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
missing=
for tool in cmake aarch64-linux-gnu-g++ qemu-aarch64; do
  command -v "$tool" > /dev/null || missing="$missing $tool"
done
if [ -n "$missing" ]; then
  echo "neon: NOT VERIFIED: no aarch64 compiler/qemu; not found:$missing (Debian: cmake, g++-aarch64-linux-gnu, qemu-user)"
  exit 0
fi
mkdir -p "$1"
build=$(cd "$1" && pwd)
{
  cmake -S "$root/tests/native" -B "$build" -DCMAKE_BUILD_TYPE=Release -DCMAKE_SYSTEM_NAME=Linux \
    -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static
  cmake --build "$build" --parallel 2
} > "$build/log" 2>&1 || {
  tail -n 40 "$build/log"
  exit 1
}
qemu-aarch64 -cpu max "$build/kernels_agree" neon_dot neon
qemu-aarch64 -cpu cortex-a72 "$build/kernels_agree" neon
qemu-aarch64 -cpu max "$build/fuzz_list_scan" --seconds 10
echo "neon: ok"
