#!/usr/bin/env bash
# ci/slurm.sh [PYTEST-ARGUMENT...]: the Slurm tier, tests/slurm, under a real Slurm.
# Installs Debian's Slurm, Open MPI and MPICH when they are missing. Needs root, network namespaces and Debian or Ubuntu; cgroups of
# version 1 for the rows with cgroups. Arguments go to every pytest. All run; the exit code is 1 when any of them failed, or when
# nothing could be run at all.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=ci/stages.sh
. ci/stages.sh
[[ $(id -u) -eq 0 ]] || { echo "ci/slurm.sh: needs root: namespaces, device files, Slurm's daemons" >&2; exit 1; }

# the slurm-wlm-* plugins come with slurm-wlm; libpmix-dev has the libpmix.so that Slurm's PMIx plugin loads
packages=(slurm-wlm slurm-client munge libpmix-dev iproute2 util-linux gcc libc6-dev openmpi-bin mpich)
install_packages "${packages[@]}"

export DASK_GPU_MPI_TEST_SLURM=required
environments
# one after the other: there is one Slurm with cgroups at a time
stage "slurm: Open MPI" job_tests openmpi "${share[@]}" tests/slurm
stage "slurm: MPICH" job_tests mpich "${share[@]}" tests/slurm
# on a machine that has cgroups these rows run, or fail
# shellcheck source=ci/testbed/lib.sh
if reason=$(. ci/testbed/lib.sh && why_no_cgroups); then report+=("cgroup rows: skipped ($reason)"); fi
summary
