# shellcheck shell=bash
# What `run` and `long` share: a scratch folder, steps that are counted, the verdict. Sourced, not run.

set -uo pipefail
export PY_COLORS=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=1
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
log=$scratch/log
export scratch
passed=0 failed=0 alone=0

# How many failed tests are run again; where there are more, it is not the machine.
FEW=5

# step NAME SECONDS COMMAND...: runs it without stdin, at most so long, and counts it as one check.
step() {
  local name=$1 seconds=$2 started=$SECONDS
  shift 2
  # shellcheck disable=SC2046  # so that `timeout` may run the functions of this script, too
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

# shown NAME SECONDS COMMAND...: a step whose last lines are shown where it goes well, too.
shown() {
  step "$@" && tail -n 30 "$log"
}

# suite NAME SECONDS FOLDER PYTHON COMMAND...: a step that ends in pytest, in that folder with that Python; each test counts.
# Servers and processes are tested beside each other, on machines that others use too: a few that fail there are run
# again, alone. One that fails again has failed; one that does not is told of, here and in the verdict.
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

# counted NAME SECONDS COMMAND...: a step whose tests count in its stead: puts pytest's last line into `summary`, and
# shows it. The step itself has failed where there is none, or where it went wrong and no test did.
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

# count WORD: how many of them the summary has.
count() {
  local found
  found=$(grep -oE "[0-9]+ $1\b" <<<"$summary" | grep -oE '^[0-9]+')
  echo "${found:-0}"
}

# copied FOLDER [PATHSPEC...]: puts the files that git knows into FOLDER.
copied() {
  local folder=$1
  shift
  mkdir -p "$folder" && git ls-files -z -- . "$@" | tar --null -T - -cf - | tar -xf - -C "$folder"
}

# command_of HEADING: the command in README.md under that heading.
command_of() {
  awk -v heading="## $1" '
    $0 == heading { here = 1; next }
    here && /^## / { exit }
    here && /^```bash/ { code = 1; next }
    code && /^```/ { exit }
    code
  ' README.md
}

# in_folder FOLDER COMMAND...: runs the command there.
in_folder() {
  (cd "$1" && shift && "$@")
}

# wheels PYTHON FOLDER: builds the five wheels.
wheels() {
  local project
  for project in . environments/*/ compat/; do
    "$1" -m build --no-isolation --wheel --outdir "$2" "$project" || return 1
  done
}

# tested PYTHON [OPTION...]: runs the test-suite against what PYTHON has installed, with no source of it in reach.
tested() {
  local folder=$scratch/suite python=$1
  shift
  rm -rf "$folder"
  copied "$folder" ':!gymsdk' ':!environments/*/gym_env_*' ':!compat' || return 1
  # These two are about the checkout itself; README's test command has run them there.
  in_folder "$folder" "$python" -m pytest --ignore=tests/test_packaging.py --ignore=tests/test_layers.py "$@"
}

# verdict: prints the counts, and ends with 1 where anything failed.
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
