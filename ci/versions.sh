#!/usr/bin/env bash
# ci/versions.sh [PYTEST-ARGUMENT...]: the releases that the package supports: RAPIDS (dask-cuda with the Dask that it pins) oldest, middle and
# newest, and the newest Dask that is tested, on CPUs; the two newest on the newest Python found. In each, under MPICH: the main job, GPU
# workers of that release on emulated GPUs, and the table of private API; not in the middle all that tests workers; with the oldest and
# the newest Dask drop-in and faults.
# All environments run; the exit code is 1 when any of them failed.
# shellcheck disable=SC2329  # the functions below are called by name, by `stage`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh

# NAME PYTHON EXTRAS CONSTRAINT. As base/versions has them, which tests/pure/base/test_versions.py enforces.
releases=(
  "rapids-25.10 python3 test,gpu dask-cuda==25.10.*"
  "rapids-26.06 python3 test,gpu dask-cuda==26.6.*"
  "rapids-26.10 newest test,gpu dask-cuda==26.10.*"
  "dask-2026.8 newest test distributed==2026.8.*"
)
cpu_tests=(tests/pure/base/test_private_api.py tests/mpi/test_main_job.py)
gpu_tests=(tests/pure/workers/test_device_memory.py tests/mpi/test_gpus.py)
# with the oldest and the newest Dask; the other tiers have them with that of RAPIDS 26.10
end_tests=(tests/mpi/test_drop_in.py tests/faults)

# The newest Python that starts: a name on PATH may be a stub for a version that is not there, or not chosen (pyenv)
newest_python() {
  local minor python
  for minor in 14 13 12; do
    for python in "python3.$minor" "$(pyenv root 2> /dev/null)"/versions/3."$minor".*/bin/python; do
      if "$python" -c "" 2> /dev/null; then echo "$python"; return; fi
    done
  done
  echo python3
}

# make NAME PYTHON EXTRAS CONSTRAINT: the environment .venv/NAME
make() {
  local python=$2 extras
  if [[ $python == newest ]]; then python=$(newest_python); fi
  IFS=, read -ra extras <<< "$3"
  mkdir -p .venv
  echo "$4" > ".venv/$1.constraint"
  PYTHON=$python PIP_CONSTRAINT=$PWD/.venv/$1.constraint bash ci/env.sh mpich ".venv/$1" "${extras[@]}"
}

# Extras change nothing where RAPIDS is installed already. Of the installed copy: the sources are being built for the next environment.
extras_change_nothing() {
  local planned
  planned=$(".venv/$1/bin/python" -m pip install --disable-pip-version-check --dry-run 'dask-gpu-mpi[gpu]') || return 1
  planned=$(sed -n 's/^Would install //p' <<< "$planned" | tr ' ' '\n' | grep -v '^dask-gpu-mpi-' || true)
  [[ -z $planned ]] || { echo "pip would install $planned"; return 1; }
}

# run_tests NAME EXTRAS
run_tests() {
  local paths=("${cpu_tests[@]}")
  if [[ $2 == *gpu* ]]; then paths+=("${gpu_tests[@]}"); fi
  if [[ $1 == rapids-25.10 || $1 == rapids-26.10 ]]; then paths+=(tests/pure/workers); fi
  if [[ $1 == rapids-25.10 || $1 == dask-* ]]; then paths+=("${end_tests[@]}"); fi
  ".venv/$1/bin/python" -c 'import sys, distributed; print("Python", sys.version.split()[0], "distributed", distributed.__version__)'
  # that row alone waits for a minute, and depends on no version
  tests "$1" -m "quick or versions or not mpi" --deselect tests/faults/test_starts.py::test_worker_that_dies_at_each_start "${paths[@]}"
}

# One environment is made while the one before it is tested.
making=
next() {
  if [[ $1 -lt ${#releases[@]} ]]; then
    read -r name python extras constraint <<< "${releases[$1]}"
    make "$name" "$python" "$extras" "$constraint" > ".venv/$name.log" 2>&1 &
    making=$!
  fi
}

made() {
  wait "$making" && rc=0 || rc=$?
  cat ".venv/$1.log"
  return "$rc"
}

mkdir -p .venv
next 0
for index in "${!releases[@]}"; do
  read -r name _ extras _ <<< "${releases[$index]}"
  environment=$name
  if ! stage "$name: environment" made "$environment"; then continue; fi
  here=$extras
  next $((index + 1))
  if [[ $failed -ne 0 && ! -e .venv/$environment/made-from ]]; then continue; fi
  stage "$environment: tests" run_tests "$environment" "$here"
  if [[ $here == *gpu* ]]; then stage "$environment: extras" extras_change_nothing "$environment"; fi
done
summary
