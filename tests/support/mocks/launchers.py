"""The variables of a real rank below each launcher: rank 1 of 4, the second on its host."""

from __future__ import annotations

from collections.abc import Mapping

#: By the launcher's name in messages.
SAMPLES: Mapping[str, Mapping[str, str]] = {
    "dask-gpu-mpi launch": {"DGM_RANK": "1", "DGM_SIZE": "4", "DGM_MEETING_FD": "5"},
    "Open MPI's mpirun": {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_FILE_LOCATION": "/tmp/ompi.4794/1/0",
        "PMIX_NAMESPACE": "prterun-host-4794@1",
        "PMIX_RANK": "1",
        "PMIX_SERVER_URI41": "prterun-host-4794@0.0;tcp4://127.0.0.1:33807",
        "PRTE_LAUNCHED": "1",
    },
    "the mpiexec of MPICH or Intel MPI (Hydra)": {
        "PMI_RANK": "1",
        "PMI_SIZE": "4",
        "PMI_FD": "9",
        "MPI_LOCALRANKID": "1",
        "MPI_LOCALNRANKS": "2",
        "HYDI_CONTROL_FD": "7",
    },
    "PALS (mpiexec)": {
        "PALS_RANKID": "1",
        "PALS_LOCAL_RANKID": "1",
        "PALS_APID": "af1c",
        "PMI_SIZE": "4",
        "PMI_RANK": "1",
    },
    "flux run": {
        "FLUX_TASK_RANK": "1",
        "FLUX_JOB_SIZE": "4",
        "FLUX_TASK_LOCAL_ID": "1",
        "PMI_RANK": "1",
        "PMI_FD": "5",
    },
    "srun": {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": "1",
        "SLURM_STEP_NODELIST": "h[1-2]",
    },
    "a launcher with PMI": {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1"},
}
