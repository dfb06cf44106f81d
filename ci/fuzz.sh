#!/usr/bin/env bash
# ci/fuzz.sh [INPUTS [PATTERN]]: the fuzz tests (tests/pure/test_fuzz.py) with so many inputs for each reader (100,000), on all cores; with
# a pattern only the tests whose names it matches (grep -E). PYTHON names the Python, with pytest and hypothesis (.venv/openmpi's).
# Each test is run in eight parts, each with a seed of its own. Prints a line for each test; exit code 1 if one has failed. Run by hand:
# it takes an hour on two cores.
# shellcheck disable=SC2329  # xargs calls it
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
inputs=${1:-100000} pattern=${2:-.}
python=${PYTHON:-.venv/openmpi/bin/python}
parts=8
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# part NODEID SEED: writes "NAME SECONDS RC" to a file of its own, and the output if it has failed
part() {
  local name=${1##*::} start=$SECONDS rc=0
  DASK_GPU_MPI_FUZZ=$each "$python" -m pytest -q -p no:cacheprovider -o timeout=0 --hypothesis-seed="$2" "$1" \
    > "$work/$name.$2.log" 2>&1 || rc=$?
  echo "$name $((SECONDS - start)) $rc" > "$work/$name.$2.end"
  [[ $rc -eq 0 ]] || tail -n 40 "$work/$name.$2.log"
}
export -f part
export work python each=$(((inputs + parts - 1) / parts))

mapfile -t tests < <("$python" -m pytest --collect-only -q tests/pure/test_fuzz.py | grep :: | grep -E "$pattern")
for test in "${tests[@]}"; do
  for ((seed = 1; seed <= parts; seed++)); do printf '%s\0%s\0' "$test" "$seed"; done
done | xargs -0 -n 2 -P "$(nproc)" bash -c 'part "$@"' part

failed=0
printf '%-45s %9s %9s\n' test inputs "CPU s"
for test in "${tests[@]}"; do
  name=${test##*::}
  read -r seconds wrong < <(cat "$work/$name".*.end | awk '{s += $2; w += $3 != 0} END {print s, w}')
  printf '%-45s %9d %9d  %s\n' "$name" $((each * parts)) "$seconds" "$([[ $wrong -eq 0 ]] && echo ok || echo FAILED)"
  [[ $wrong -eq 0 ]] || failed=1
done
exit "$failed"
