#!/usr/bin/env sh
# Builds the sdist, a wheel from that sdist, installs the wheel into a clean environment and imports every module from
# outside the checkout: a forgotten package, link or data file shows here and nowhere else.
set -eu
PYTHON=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$PYTHON" -m venv "$work/build"
"$work/build/bin/pip" install -q --disable-pip-version-check build
cd "$work"
"$work/build/bin/python" -m build --outdir "$work/dist" "$root" > "$work/build.log" 2>&1 || {
  tail -n 40 "$work/build.log"
  exit 1
}
"$PYTHON" -m venv "$work/clean"
# The pins of the suite and the demo, by a machine that has neither packages nor settings of its own.
pins=$(env -u PIP_FIND_LINKS -u PIP_INDEX_URL -u PIP_EXTRA_INDEX_URL PIP_CONFIG_FILE=/dev/null "$work/clean/bin/pip" \
  install -q --dry-run --disable-pip-version-check -c "$root/constraints.txt" \
  "$(echo "$work"/dist/*.whl)[device,test,lint,demo]" 2>&1) && pins="found" || case $pins in
  *ResolutionImpossible* | *"from versions: "[0-9]*) echo "$pins"; echo "PyPI cannot install constraints.txt"; exit 1 ;;
  *) pins="NOT VERIFIED (no package index)" ;;
esac
"$work/clean/bin/pip" install -q --no-compile --disable-pip-version-check -c "$root/constraints.txt" "$work"/dist/*.whl
# What it takes on disk without torch and faiss, and without byte code, which Python writes of what it imports.
megabytes=$(find "$work"/clean/lib/python*/site-packages -type f ! -path '*/site-packages/pip*' \
  ! -path '*/site-packages/setuptools*' ! -name '*.pyc' -printf '%s\n' | awk '{ n += $1 } END { printf "%d", n / 1e6 }')
[ "$megabytes" -le 250 ] || { echo "the core takes $megabytes MB, at most 250 are allowed"; exit 1; }
# The guard runs from an empty folder, so that nothing of the checkout can be imported by accident.
mkdir "$work/empty"
cd "$work/empty"
"$work/clean/bin/python" "$root/tests/packaging/import_every_module.py" "$work"/dist/*.whl
"$work/clean/bin/hybridindex" --version
# Without faiss the doctor must say that something essential is missing.
status=0
"$work/clean/bin/hybridindex" doctor --json > /dev/null || status=$?
[ "$status" -eq 11 ] || { echo "doctor without faiss: exit status $status, expected 11"; exit 1; }
# What lacks packages says which, and how to get them.
"$work/clean/bin/python" -c "import numpy; numpy.save('rows.npy', numpy.ones((100, 8), numpy.float32))"
echo "some text" > some.txt
for words in demo "build rows.npy idx" "import rows.npy idx" "search idx --queries rows.npy" "report idx" "serve idx" \
  "ingest some.txt idx --embedder demo" "ingest some.txt idx --embedder sentence-transformers:a"; do
  # shellcheck disable=SC2086 # several words
  said=$("$work/clean/bin/hybridindex" $words 2>&1) && { echo "'$words' succeeded without its packages"; exit 1; }
  case $said in
    *Traceback*) echo "$said"; echo "'hybridindex $words' ended in an error of Python"; exit 1 ;;
    *MissingDependencyError*"pip install '"*) ;;
    *) echo "$said"; echo "'hybridindex $words' does not say what to install"; exit 1 ;;
  esac
done
"$work/clean/bin/pip" install -q --disable-pip-version-check -c "$root/constraints.txt" "faiss-cpu"
"$work/clean/bin/hybridindex" doctor > /dev/null
echo "wheel-check: ok; the core takes $megabytes MB without byte code; pins on PyPI: $pins"
