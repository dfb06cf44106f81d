"""Checks an installed dask_gpu_mpi, not the checkout: `python -P ci/check_package.py PREFIX` (called by ci/lint.sh)."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata, resources
from pathlib import Path


def main(prefix: str) -> int:
    """Return 0, or 1 after printing what is wrong with the package installed below `prefix`."""
    wrong = []
    before = set(sys.modules)
    import dask_gpu_mpi

    loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
    if heavy := loaded & {"dask", "distributed", "mpi4py", "numpy", "dask_cuda", "dask_mpi"}:
        wrong.append(f"import dask_gpu_mpi loads {', '.join(sorted(heavy))}")
    if not Path(dask_gpu_mpi.__file__ or "").is_relative_to(prefix):
        wrong.append(f"dask_gpu_mpi comes from {dask_gpu_mpi.__file__}, not from {prefix}")
    scripts = Path(__file__).resolve().parents[1] / "jobscripts"
    for name in (
        "gpu-mpi.yaml",
        "gpu-mpi-schema.json",
        "py.typed",
        "view/report.html",
        "sites/tmrsh",
        "sites/named/perlmutter.yaml",
        *(f"jobscripts/{path.name}" for path in scripts.iterdir()),
    ):
        if not resources.files("dask_gpu_mpi").joinpath(name).is_file():
            wrong.append(f"{name} is not in the package")
    asked = [
        "jobscript",
        "slurm",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--time",
        "01:00:00",
        "--",
        "-c",
        "pass",
    ]
    made = subprocess.run([f"{prefix}/bin/dask-gpu-mpi", *asked], capture_output=True, text=True, cwd="/")
    if made.returncode or "\n#SBATCH --nodes=2\n" not in made.stdout:
        wrong.append(f"jobscript exits {made.returncode}: {made.stdout}{made.stderr}")
    if not metadata.metadata("dask-gpu-mpi")["License-Expression"]:
        wrong.append("no license in the metadata")
    # all ways to the command line, Dask's plugin point included
    commands = (
        [f"{prefix}/bin/dask-gpu-mpi"],
        [sys.executable, "-m", "dask_gpu_mpi"],
        [sys.executable, "-m", "dask", "gpu-mpi"],
    )
    for command in commands:
        try:
            done = subprocess.run([*command, "--help"], capture_output=True, text=True, cwd="/")
        except OSError as error:
            wrong.append(str(error))
            continue
        if done.returncode or "Usage:" not in done.stdout or done.stderr:
            wrong.append(f"{' '.join(command)} --help exits {done.returncode}: {done.stdout}{done.stderr}")
    print("\n".join(wrong) or "package: ok")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
