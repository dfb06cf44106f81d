#!/bin/bash
# One Dask cluster on whole nodes, a worker on every GPU:
#   flux batch -N2 flux.sh my.py ARGS...
# Options of flux batch win over the lines below. Settings (DGM_...): docs/batch.md
# shellcheck disable=SC1090,SC1091  # files of yours
# flux: --job-name=dask-gpu-mpi
# flux: --nodes=1
# flux: --exclusive
# flux: --time-limit=60m
# flux: --output=dask-gpu-mpi-{{id}}.log

program=("$@")
((${#program[@]})) || { echo "usage: flux batch [OPTIONS] flux.sh SCRIPT ARGS..." >&2; exit 2; }
# program=(--launcher-option=--signal=USR1@120 "${program[@]}")  # a signal to all ranks before the walltime
[[ ${FLUX_URI:-} ]] || { echo "this is no job of Flux. Fix: submit this script by flux batch" >&2; exit 2; }
set --  # a sourced file takes the arguments for its own
# Your environment, here or in a file that DGM_SETUP names:
# module load cuda
# source ~/venv/bin/activate
setup=${DGM_SETUP:-/dev/null}; shopt -u sourcepath  # a name without a directory is a file here
[[ -r $setup && ! -d $setup ]] || { echo "DGM_SETUP: $setup is no file that can be read on $HOSTNAME" >&2; exit 2; }
source -- "$setup"
command -v dask-gpu-mpi > /dev/null || { echo "dask-gpu-mpi: not in PATH. Fix: activate its environment above" >&2; exit 2; }

# its exit code is the job's: 75 after a checkpoint of session.on_walltime. Flux does not requeue.
exec dask-gpu-mpi launch --check "${program[@]}"
