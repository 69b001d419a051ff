#!/usr/bin/env sh
# sanitize.sh FOLDER: the tests of the native scans, of lists and of pages, with an extension that has address and
# undefined-behaviour checks (scanners in torch and triton run no line of it and are left out), then the fuzz target and
# the comparison of instruction sets with the same, and the fuzz target with the thread sanitizer. PYTHON is of an
# environment that has what the tests need; the extension is built into another one below FOLDER that borrows its
# packages.
set -eu
PYTHON=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
venv=$folder/venv
cd "$root"
[ -x "$venv/bin/python" ] || "$PYTHON" -m venv --without-pip "$venv"
# What a .pth file names is not searched for .pth files: the other environment's own hybridindex stays out.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/borrowed.pth"
"$PYTHON" -m pip --disable-pip-version-check --python "$venv/bin/python" install -q --no-deps --force-reinstall \
  ${PIP_BUILD_ARGS:-} -c constraints.txt -e . -C build-dir="$folder/extension" -C cmake.build-type=RelWithDebInfo \
  -C install.strip=false -C cmake.define.HYBRIDINDEX_SANITIZE=ON

# Both before anything else: exceptions must find the sanitizer's handler and the library's. Reports of leaks would be
# the interpreter's own.
compiler=${CXX:-c++}
preload="$("$compiler" -print-file-name=libasan.so) $("$compiler" -print-file-name=libstdc++.so)"
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 "$venv/bin/python" -c '
import sys
from hybridindex import _native
assert _native.__file__.startswith(sys.prefix), _native.__file__
assert b"__asan_init" in open(_native.__file__, "rb").read(), "the extension has no sanitizer"
'
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
  "$venv/bin/python" -m pytest ${PARALLEL:-} tests/native tests/tiers/test_scanner_contract.py \
  tests/tiers/paged/test_native_scanner.py \
  tests/tiers/paged/test_scan_tables.py tests/tiers/paged/test_arena.py tests/tiers/paged/test_copier.py \
  -k "not torch and not triton"
sh "$here/fuzz.sh" "$folder" address,undefined --seconds 15
UBSAN_OPTIONS=print_stacktrace=1 "$folder/fuzz-address-undefined/kernels_agree"
sh "$here/fuzz.sh" "$folder" thread --seconds 15 --callers 4
echo "sanitize: ok"
