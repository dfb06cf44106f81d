#!/usr/bin/env bash
# ci/test.sh [PYTEST-ARGUMENT...]: makes an environment with Open MPI, and runs in it the pure tests, but for slow ones, and the rows of real
# jobs that are marked `quick`; five minutes on two quiet cores. ci/lint.sh, ci/matrix.sh and ci/faults.sh have the rest.
# Arguments go to pytest, e.g. `ci/test.sh -k placement`. Nothing is run again. The exit code is 1 when a test failed.
# shellcheck disable=SC2329  # the function below is called by name, by `stage`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh

# Tests wait for much of their time, so three processes share two cores. Each takes the next file when it is done with one: nobody needs to
# balance them.
beside() {
  tests openmpi -n 3 --dist loadfile --durations 10 -m "quick or not (slow or mpi)" tests/pure tests/mpi tests/hosts tests/faults
}

stage "env openmpi" make_environment openmpi
[[ $failed -eq 0 ]] || summary
stage "tests" beside
summary
