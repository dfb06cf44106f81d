#!/usr/bin/env bash
# ci/test.sh [PYTEST-ARGUMENT...]: makes the environments, lints, checks types and the package, runs the pure tests and, under both
# MPIs, the rows of real jobs that are marked `quick`; ten minutes on two cores. ci/matrix.sh and ci/faults.sh have the others.
# Arguments go to every pytest, e.g. `ci/test.sh -k placement`. All stages run; the exit code is 1 when any of them failed.
# shellcheck disable=SC2329  # the functions below are called by name, by `stage`
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh
bin=.venv/openmpi/bin

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
# From a copy of the sources, in which the other environment's build writes at the same time.
package() {
  local work site
  work=$(mktemp -d)
  # shellcheck disable=SC2064  # now, not then
  trap "rm -rf '$work'" RETURN
  mkdir "$work/sources"
  git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference --target-directory="$work/sources" || return 1
  # every dependency has a wheel
  "$bin/python" -m pip install -qq --dry-run --ignore-installed --only-binary=:all: "$work/sources" || return 1
  CC=false CXX=false "$bin/python" -m pip wheel -qq --no-deps --wheel-dir "$work" "$work/sources" || return 1
  ls "$work"/dask_gpu_mpi-*-py3-none-any.whl || return 1
  "$bin/python" -m venv "$work/venv" || return 1
  "$work/venv/bin/python" -m pip install -qq --no-deps --no-index "$work"/*.whl || return 1
  # dependencies from the test environment, but not the MPI beside them: mpi4py looks for it below sys.prefix
  site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || return 1
  echo "$site" > "$("$work/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/rest.pth"
  "$work/venv/bin/python" -P ci/check_package.py "$work/venv" || return 1
}

# The pure tests but for slow ones, which ci/matrix.sh runs: in two processes beside each other that take about as long, some packages and
# all else.
pure() {
  local part packages=() ignored=() log other rc=0
  for part in agent check cli job options sites workers; do
    packages+=("tests/pure/$part")
    ignored+=("--ignore=tests/pure/$part")
  done
  log=$(mktemp)
  tests openmpi -m "not slow" "${packages[@]}" > "$log" 2>&1 &
  other=$!
  tests openmpi -m "not slow" "${ignored[@]}" tests/pure || rc=1
  made_beside "$other" "$log" || rc=1
  rm "$log"
  return "$rc"
}

# The environment of the other MPI is made beside what needs the first alone.
stage "env openmpi" make_environment openmpi
[[ $failed -eq 0 ]] || summary
make_environment mpich > .venv/mpich.log 2>&1 &
mpich=$!
stage "ruff check" "$bin/ruff" check .
stage "ruff format" "$bin/ruff" format --check .
stage "mypy" "$bin/mypy" --strict dask_gpu_mpi
stage "imports" "$bin/lint-imports"
stage "shellcheck" shellcheck_all
stage "codespell" "$bin/codespell"
stage "package" package
stage "env mpich, the rest" made_beside "$mpich" .venv/mpich.log
[[ -e .venv/mpich/made-from ]] || summary
stage "pure" pure
# ci/matrix.sh and ci/faults.sh have the other rows.
both "mpi, hosts" quick tests/mpi tests/hosts
ucx quick
both faults quick tests/faults
summary
