#!/usr/bin/env bash
# ci/lint.sh: style, types, imports, shell scripts, spelling, and the package as users get it; a minute on two cores. In the environment of
# ci/test.sh, made if it is missing. All stages run; the exit code is 1 when any of them failed.
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
# From a copy of the sources, in which an environment's build may write at the same time.
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

stage "env openmpi" make_environment openmpi
[[ $failed -eq 0 ]] || summary
stage "ruff check" "$bin/ruff" check .
stage "ruff format" "$bin/ruff" format --check .
stage "mypy" "$bin/mypy" --strict dask_gpu_mpi
stage "imports" "$bin/lint-imports"
stage "shellcheck" shellcheck_all
stage "codespell" "$bin/codespell"
stage "package" package
summary
