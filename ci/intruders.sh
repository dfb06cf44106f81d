#!/usr/bin/env bash
# ci/intruders.sh [PYTEST-ARGUMENT...]: strangers who try to get into jobs, tests/intruders, under both MPIs; five minutes at most on
# two cores. As root, for the namespace hosts of ci/testbed and to become another user; else most rows are skipped.
# Arguments go to every pytest. Both run; the exit code is 1 when any of them failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh
environments
both intruders slow tests/intruders
summary
