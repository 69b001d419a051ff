#!/usr/bin/env sh
# fuzz.sh FOLDER SANITIZERS [ARGUMENT...]: builds the fuzz target with these sanitizers below FOLDER and runs it.
set -eu
PYTHON=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
mkdir -p "$1"
build=$(cd "$1" && pwd)/fuzz-$(echo "$2" | tr , -)
sanitizers=$2
shift 2
# The cmake that builds the extension may be one that pip fetched: then another is fetched here.
if ! cmake=$(command -v cmake); then
  "$PYTHON" -m venv "$build/tools"
  "$build/tools/bin/pip" install -q --disable-pip-version-check cmake
  cmake=$build/tools/bin/cmake
fi
{
  "$cmake" -S "$root/tests/native" -B "$build" -DSANITIZERS="$sanitizers"
  "$cmake" --build "$build" --parallel 2
} > "$build.log" 2>&1 || {
  tail -n 40 "$build.log"
  exit 1
}
# Thread sanitizers older than GCC 14 do not know the addresses that newer kernels hand out at random.
still=
if [ "$sanitizers" = thread ] && setarch -R true 2> /dev/null; then still="setarch -R"; fi
UBSAN_OPTIONS=print_stacktrace=1 $still "$build/fuzz_list_scan" "$@"
