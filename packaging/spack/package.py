from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyDaskGpuMpi(PythonPackage):
    """One batch job becomes one Dask cluster with a worker on every GPU."""

    # both exist from the first release on, whose checksum `spack checksum` adds
    homepage = "https://pypi.org/project/dask-gpu-mpi"
    pypi = "dask-gpu-mpi/dask_gpu_mpi-0.1.0.tar.gz"

    license("BSD-3-Clause", checked_by="dask_gpu_mpi developers")

    version("0.1.0")

    depends_on("py-setuptools@77:", type="build")

    with default_args(type=("build", "run")):
        depends_on("python@3.11:")
        depends_on("py-click@8.1:")
        depends_on("py-cryptography@42:")
        depends_on("py-dask-mpi@2026.3:")
        depends_on("py-distributed@2025.9.1:")
        depends_on("py-mpi4py@4:")
        depends_on("py-msgpack@1.0.2:")
        depends_on("py-nvidia-ml-py@12:")
        depends_on("py-packaging@21:")
        depends_on("py-psutil@5.8:")
        depends_on("py-rich@13:")
