"""``python -m dask_gpu_mpi``."""

from .cli.main import main

if __name__ == "__main__":
    main()
