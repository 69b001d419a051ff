# For scripts that run tests in an environment of their own, made once. Sourced by one in a folder of tests, with the
# environment's folder as its argument; it defines install, which fills $venv by $pip, and calls make_environment.
set -eu
PYTHON=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
venv=$1
pip="$venv/bin/python -m pip --disable-pip-version-check -q"

# make_environment TARGET WHAT CONSTRAINTS OURS: ends the script with "NOT VERIFIED" where WHAT cannot be installed,
# which is no failure of ours. OURS is pip's word for the product and what of it the tests need. ONLY_ENVIRONMENT=1 ends
# the script when it is made.
make_environment() {
  log="$venv.log"
  stamp="$venv/.installed"
  mkdir -p "$(dirname "$venv")"
  if [ ! -e "$stamp" ] || [ "$3" -nt "$stamp" ] || [ "$0" -nt "$stamp" ]; then
    # In a shell of its own: "set -e" does not hold inside a condition.
    status=0
    (set -e; rm -rf "$venv"; "$PYTHON" -m venv "$venv"; install) > "$log" 2>&1 & wait $! || status=$?
    if [ "$status" -ne 0 ]; then
      tail -n 5 "$log"
      echo "$1: NOT VERIFIED: $2 cannot be installed here (see $log)"
      exit 0
    fi
    touch "$stamp"
  fi
  # Ours must build: from here on, what fails is a failure. Python files are read where they are.
  ours="$venv/.ours"
  if [ ! -e "$ours" ] || [ -n "$(find pyproject.toml CMakeLists.txt hybridindex/native -newer "$ours")" ]; then
    $pip install -c "$3" -e "$4"
    touch "$ours"
  fi
  if [ -n "${ONLY_ENVIRONMENT:-}" ]; then
    echo "$1: the environment is there"
    exit 0
  fi
}
