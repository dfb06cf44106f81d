#!/usr/bin/env bash
# ci/matrix.sh [PYTEST-ARGUMENT...]: the pure tests that are slow, and the rows of tests/mpi, tests/hosts and tests/ucx that are not in
# ci/test.sh (those are marked `quick`); a quarter of an hour on two cores. Rows that the MPI makes no difference to run by turns (ci/stages.sh);
# `TURN=all ci/matrix.sh` runs all under both. Arguments go to every pytest. All stages run; exit code 1 when any of them failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh
environments

# What looks at pages and tunnels is skipped, and says so, where these can't be had.
if [[ $(id -u) -eq 0 ]] && command -v apt-get > /dev/null; then
  stage "browser, ssh" install_packages chromium chromium-driver fonts-dejavu-core openssh-server || true
  failed=0
fi
stage "pure, the rest" tests openmpi -m slow tests/pure
both "mpi, hosts" "not quick" tests/mpi tests/hosts
ucx "not quick"
summary
