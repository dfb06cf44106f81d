"""``python -m dask_gpu_mpi``."""

try:
    from dask_gpu_mpi.cli.main import main
except (ImportError, SyntaxError) as error:
    # A node with another Python, which has only this package: no launcher would report the node.
    import platform
    import sys

    python = f"{sys.executable} (Python {platform.python_version()})"
    sys.stderr.write(
        f"dask_gpu_mpi: error: {platform.node()}: {python} can't import dask_gpu_mpi: {error} (expected: one environment on all "
        "nodes). Fix: start the job with the full path of the Python into which dask-gpu-mpi is installed\n"
    )
    sys.exit(2)

if __name__ == "__main__":
    main()
