#!/usr/bin/env bash
# Before: a scheduler, `dask cuda worker` on every node, and a script, by hand. On several nodes the second line is
# `srun --ntasks-per-node=1 dask cuda worker ...`.
#     bash examples/migration/before_dask_cuda_worker.sh
set -euo pipefail
folder=$(mktemp -d)
trap 'kill $(jobs -p) 2> /dev/null; wait; rm -rf "$folder"' EXIT
dask scheduler --port 0 --no-dashboard --scheduler-file "$folder/scheduler.json" &
dask cuda worker --scheduler-file "$folder/scheduler.json" &
until [[ -s $folder/scheduler.json ]]; do sleep 0.2; done
python "$(dirname "${BASH_SOURCE[0]}")/before_dask_cuda_worker.py" "$folder/scheduler.json"
