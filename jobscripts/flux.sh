#!/bin/bash
# One Dask cluster on whole nodes, a worker on every GPU:
#   flux batch -N2 flux.sh my.py ARGS...
# Options of flux batch win over the lines below. The settings: edit them, or export DGM_...=
# shellcheck disable=SC1090,SC1091  # files of yours
# flux: --job-name=dask-gpu-mpi
# flux: --nodes=1
# flux: --exclusive
# flux: --time-limit=60m
# flux: --output=dask-gpu-mpi-{{id}}.log

setup=${DGM_SETUP:-}  # file to source: modules, venv, conda; or write them below
container=${DGM_CONTAINER:-}  # Apptainer image to run in
scratch=${DGM_SCRATCH:-}  # node-local directory with a short path, there on every host; empty: $TMPDIR or /tmp of each host
mpi=${DGM_MPI:-}  # flux run -o pmi=...; empty: what the MPI library of mpi4py needs
logs=${DGM_LOGS:-logs}  # directory for the log files of ranks and workers
check=${DGM_CHECK:-yes}  # no: without the preflight
expect=${DGM_EXPECT_GPUS:-}  # GPUs that each host must have, for the preflight; empty: not looked at
ranks=${DGM_RANKS_PER_NODE:-1}
modules=()
program=("$@")
set --  # a sourced file takes the arguments for its own
((${#program[@]})) || { echo "usage: flux batch [OPTIONS] flux.sh SCRIPT ARGS..." >&2; exit 2; }

# -- environment, here or in $DGM_SETUP: module load cuda; source ~/venv/bin/activate; source ~/miniforge3/bin/activate NAME
((${#modules[@]} == 0)) || { type -t module > /dev/null || source /etc/profile; module load "${modules[@]}" || exit 2; }
[[ -z $setup || -f $setup && -r $setup ]] || { echo "DGM_SETUP: $setup is no file that can be read on $HOSTNAME" >&2; exit 2; }
case $setup in "") ;; /*) source "$setup" ;; *) source "./$setup" ;; esac; set +euo pipefail  # what it may have set ends this
export DASK_GPU_MPI__WALLTIME_SIGNAL=${DASK_GPU_MPI__WALLTIME_SIGNAL:-USR1} ${scratch:+"DASK_GPU_MPI__LOCAL_DIRECTORY=$scratch"}
at=.; for f in "${program[@]}"; do [[ ! -f $f ]] || { at=$(dirname -- "$f"); break; }; done; mkdir -p "$logs"  # for containers
mapfile -t binds < <(realpath -eqs -- "$PWD" "$at" "$logs" "$scratch" "$(dirname -- "$setup")" | sort -u | sed s/^/--bind=/)
python=(python); [[ -z $container ]] || python=(apptainer exec --nv "${binds[@]}" "$container" python)

# -- launcher: ranks that are left all cores and GPUs of their node
if [[ -z $mpi ]]; then
  case $("${python[@]}" -m mpi4py --mpi-lib-version | tr -d '\0') in *"Open MPI"*) mpi=pmix ;; esac  # others speak Flux's own
fi
launch=(flux run --nodes="$(flux getattr size)" --tasks-per-node="$ranks" --exclusive
  -o cpu-affinity=off -o gpu-affinity=off ${mpi:+-o "pmi=$mpi"})
# launch+=(--signal=USR1@120)  # to all ranks, before the walltime
[[ $check == no ]] || "${launch[@]}" "${python[@]}" -m dask_gpu_mpi check ${expect:+--expect-gpus=$expect} "${program[@]}" || exit
# its exit code is the job's: 75 after a checkpoint of session.on_walltime. Flux does not requeue.
exec "${launch[@]}" "${python[@]}" -m dask_gpu_mpi run --log-directory "$logs/$(flux getattr jobid)" "${program[@]}"
