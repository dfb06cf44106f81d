#!/usr/bin/env bash
# ci/matrix.sh [PYTEST-ARGUMENT...]: the pure tests that are slow, and tests/mpi, tests/hosts and tests/ucx, each row under one MPI, or under both if
# the MPI may make a difference; a quarter of an hour on two cores. `SHARE=both ci/matrix.sh` runs all under both (ci/stages.sh).
# Arguments go to every pytest. All stages run; exit code 1 when any of them failed.
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
both "mpi, hosts" tests/mpi tests/hosts
ucx
summary
