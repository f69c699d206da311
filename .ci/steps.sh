# shellcheck shell=bash
# Functions for `run` and `long`: a scratch folder, counted steps, and the verdict. The scripts source this file.

set -uo pipefail
export PY_COLORS=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
# Without cached bytecode, each of the many processes that the tests start would compile the package again. Python writes
# that of the modules which a process imports; pip would compile all modules of all packages.
unset PYTHONDONTWRITEBYTECODE
export PIP_COMPILE=0
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
log=$scratch/log
export scratch
passed=0 failed=0 alone=0

# The maximum number of failed tests to run again. A larger number does not come from a busy machine.
FEW=5

# step NAME SECONDS COMMAND...: runs the command without stdin and with a time limit, and counts it as one check.
step() {
  local name=$1 seconds=$2 started=$SECONDS
  shift 2
  # shellcheck disable=SC2046  # so that `timeout` can run the functions of this script too
  export -f $(compgen -A function)
  if timeout -k 10 "$seconds" bash -c '"$@"' step "$@" </dev/null >"$log" 2>&1; then
    passed=$((passed + 1))
    printf 'ok      %4d s  %s\n' $((SECONDS - started)) "$name"
  else
    failed=$((failed + 1))
    printf 'FAILED  %4d s  %s\n' $((SECONDS - started)) "$name"
    tail -n 80 "$log"
    return 1
  fi
}

# shown NAME SECONDS COMMAND...: a step that prints its last lines of output on success too.
shown() {
  step "$@" && tail -n 30 "$log"
}

# beside NAME SECONDS COMMAND...: starts a step that runs beside the next ones; `joined` waits for it and counts it.
beside() {
  local seconds=$2
  beside_name=$1 beside_started=$SECONDS
  shift 2
  # shellcheck disable=SC2046
  export -f $(compgen -A function)
  {
    timeout -k 10 "$seconds" bash -c '"$@"' step "$@" </dev/null >"$log.beside" 2>&1
    local status=$?
    echo "$SECONDS" >"$log.ended"
    exit "$status"
  } &
  beside_process=$!
}

joined() {
  local status=0 seconds
  wait "$beside_process" || status=$?
  seconds=$(($(cat "$log.ended") - beside_started))
  if [ "$status" -eq 0 ]; then
    passed=$((passed + 1))
    printf 'ok      %4d s  %s (beside others)\n' "$seconds" "$beside_name"
    tail -n 30 "$log.beside"
  else
    failed=$((failed + 1))
    printf 'FAILED  %4d s  %s\n' "$seconds" "$beside_name"
    tail -n 80 "$log.beside"
  fi
}

# suite NAME SECONDS FOLDER PYTHON COMMAND...: a step that runs pytest in FOLDER with PYTHON; each test counts.
# The tests start servers and processes at the same time, on machines with other load. Therefore, if only a few tests
# fail, they run again, alone. A test that fails again has failed. A test that passes is reported here and in the
# verdict.
suite() {
  local name=$1 seconds=$2 folder=$3 python=$4 broken names
  shift 4
  counted "$name" "$seconds" "$@" || return 1
  broken=$(count failed)
  passed=$((passed + $(count passed)))
  failed=$((failed + $(count 'errors?')))
  if [ "$broken" -gt 0 ] && [ "$broken" -le "$FEW" ]; then
    names=$(grep -E '^FAILED ' "$log")
    counted "$name: the $broken that failed, alone" 600 \
      in_folder "$folder" "$python" -m pytest -o addopts=-ra --last-failed || return 1
    printf 'failed beside others:\n%s\n' "$names"
    passed=$((passed + $(count passed)))
    alone=$((alone + $(count passed)))
    broken=$((broken - $(count passed)))
  fi
  failed=$((failed + broken))
}

# counted NAME SECONDS COMMAND...: a step that counts its tests instead of itself: stores the last line of pytest in
# `summary` and prints it. The step itself fails if there is no summary, or if the command fails but no test does.
counted() {
  local went=0
  step "$@" || went=$?
  summary=$(grep -E '^=* ?[0-9]+ (passed|failed|error|skipped|deselected).* in [0-9.]+s' "$log" | tail -n 1)
  echo "                $summary"
  if [ "$went" -eq 0 ] && [ -n "$summary" ]; then
    passed=$((passed - 1))
  elif [ "$went" -eq 0 ]; then
    passed=$((passed - 1)) failed=$((failed + 1))
    return 1
  elif [ $(($(count failed) + $(count 'errors?'))) -gt 0 ]; then
    failed=$((failed - 1))
  else
    return 1
  fi
}

# count WORD: prints the number of tests with the outcome WORD in the summary.
count() {
  local found
  found=$(grep -oE "[0-9]+ $1\b" <<<"$summary" | grep -oE '^[0-9]+')
  echo "${found:-0}"
}

# copied FOLDER [PATHSPEC...]: copies the files that git tracks into FOLDER.
copied() {
  local folder=$1
  shift
  mkdir -p "$folder" && git ls-files -z -- . "$@" | tar --null -T - -cf - | tar -xf - -C "$folder"
}

# command_of HEADING: prints the command under this heading in README.md.
command_of() {
  awk -v heading="## $1" '
    $0 == heading { here = 1; next }
    here && /^## / { exit }
    here && /^```bash/ { code = 1; next }
    code && /^```/ { exit }
    code
  ' README.md
}

# in_folder FOLDER COMMAND...: runs the command in FOLDER.
in_folder() {
  (cd "$1" && shift && "$@")
}

# pythons: prints the path of an interpreter for each other minor version, including those of pyenv.
pythons() {
  local own minor found
  own=$(python3 -c 'import sys; print(sys.version_info.minor)')
  for minor in 11 12 13 14; do
    [ "$minor" = "$own" ] && continue
    for found in "$(command -v "python3.$minor")" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$minor".*/bin/python; do
      [ -n "$found" ] && "$found" -c 'import venv, ensurepip' 2>/dev/null && echo "$found" && break
    done
  done
}

# newest_python: prints the path of the interpreter of the newest version, including those of pyenv.
newest_python() {
  { command -v python3 && pythons; } | while read -r each; do
    "$each" -c 'import sys; print(sys.version_info.minor, sys.executable)'
  done | sort -n | tail -n 1 | cut -d' ' -f2
}

# wheels PYTHON FOLDER: builds the five wheels.
wheels() {
  local project
  for project in . environments/*/ compat/; do
    "$1" -m build --no-isolation --wheel --outdir "$2" "$project" || return 1
  done
}

# tested PYTHON [OPTION...]: runs the tests against the packages that PYTHON has installed, without the sources.
tested() {
  local folder=$scratch/suite python=$1
  shift
  rm -rf "$folder"
  copied "$folder" ':!gymsdk' ':!environments/*/gym_env_*' ':!compat' || return 1
  # These two files test the checkout itself; the test command of README runs them there.
  in_folder "$folder" "$python" -m pytest --ignore=tests/test_packaging.py --ignore=tests/test_layers.py "$@"
}

# verdict: prints the counts, and exits with 1 if anything failed.
verdict() {
  printf '\nin %d s\n' "$SECONDS"
  [ "$alone" -eq 0 ] || printf '%d of these passed only alone\n' "$alone"
  printf '%d passed, %d failed\n' "$passed" "$failed"
  [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
  exit
}

python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "python3 must be Python 3.11 or newer, this is $(python3 --version 2>&1)"
  exit 2
}
