#!/usr/bin/env bash
# ci/faults.sh [PYTEST-ARGUMENT...]: the fault tier, tests/faults, under either MPI or both, as ci/matrix.sh; ten minutes on two cores.
# Arguments go to every pytest. Both run; the exit code is 1 when any of them failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh
environments
both faults tests/faults
summary
