"""The requests of 22 computing centres: how each job script is generated, and the lines that its page requires or forbids."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

__all__ = ["ROWS", "Row"]


@dataclass(frozen=True)
class Row:
    """A job at one centre."""

    name: str
    #: Options of `jobscript`.
    words: str
    #: Directives that the page requires, as words of a shell.
    required: str
    #: Beginnings of directives that the centre refuses, or that contradict the required ones.
    forbidden: str = ""
    #: Types of GPUs in the request, which a test bed must have.
    gpu_type: str = ""
    #: GPUs of each node there.
    gpus: int = 4

    @property
    def system(self) -> str:
        return "pbs" if any("-l " in word for word in shlex.split(self.required)) else "slurm"


ROWS = (
    Row(
        "NERSC",
        "--site perlmutter -N 2 -A m1234_g",
        "--constraint=gpu --qos=regular --account=m1234_g --gpus-per-node=4",
    ),
    Row(
        "OLCF",
        "--site frontier -N 2 -A abc -q debug -C nvme",
        "--partition=batch --qos=debug --constraint=nvme",
        gpus=8,
    ),
    Row("LUMI", "--site lumi-g -N 2 -A project_1", "--partition=standard-g --gpus-per-node=8", gpus=8),
    Row(
        "ARCHER2",
        "--site archer2 -N 2 -A t01",
        "--gpus=8 --nodes=2 --exclusive --partition=gpu --qos=gpu-exc",
        "--ntasks --cpus-per-task --mem --gpus-per-node",
    ),
    Row(
        "Pawsey",
        "--site setonix -N 1 -A project-gpu",
        "--partition=gpu --exclusive --gpus-per-node=8",
        gpus=8,
    ),
    Row(
        "Polaris",
        "--site polaris -N 4 -A abc -q debug",
        "'-l select=4:ncpus=256:mpiprocs=1' '-l filesystems=home:eagle' '-q debug'",
    ),
    Row("Sophia", "--site sophia --gpus 2 -A abc", "'-l select=2' '-q by-gpu'", "'-l place'"),
    Row(
        "Casper",
        "--site casper -N 2 -A abc",
        "'-l select=2:ncpus=64:mpiprocs=1:ngpus=4:gpu_type=a100:mem=409600mb' '-q casper'",
        "'-l gpu_type'",
    ),
    Row("Derecho", "--site derecho -N 2 -A abc", "'-l select=2:ncpus=64:mpiprocs=1:ngpus=4' '-q main'"),
    Row(
        "TACC",
        "--site vista -N 2 -A abc",
        "--partition=gh --nodes=2 --ntasks-per-node=1",
        "--mem --gres --gpus",
        gpus=1,
    ),
    Row(
        "CSC",
        "--site roihu -N 2 -A project_1",
        "--gres=gpu:gh200:4 --cpus-per-task=288 --partition=gpumedium",
        "--gpus --mem",
        gpu_type="gh200",
    ),
    Row(
        "NREL",
        "--site kestrel -N 2 -A abc",
        "--exclusive --mem=0 --partition=gpu-h100 --gres=gpu:h100:4",
        "--gpus",
        gpu_type="h100",
    ),
    Row("NeSI", "--site nesi -N 2 -A nesi1", "--gpus-per-node=a100:1", "--gres", gpu_type="a100"),
    Row(
        "Aalto",
        "--site triton -N 1 --gpus-per-node 2",
        "--gpus=h200:2",
        "--gpus-per-node --gres",
        gpu_type="h200",
    ),
    Row(
        "Luxembourg",
        "slurm --gpus 4 --shared --cpus-per-gpu 2 -p hopper --qos iris-hopper",
        "--gpus=4 --partition=hopper --qos=iris-hopper",
        "--nodes --gpus-per-node",
    ),
    Row(
        "Princeton",
        "slurm -N 1 --gpus-per-node 1 -C a100 --shared --cpus-per-node 4 --directive=--gres=gpu:{gpus}",
        "--gres=gpu:1 --constraint=a100",
        "--gpus --exclusive",
    ),
    Row(
        "VUB",
        "--site sofia -N 1 --gpus-per-node 2",
        "--partition=zen4_h200 --gpus-per-node=2 --cpus-per-task=48",
        "--mem --exclusive",
        gpus=2,
    ),
    Row(
        "BSC",
        "--site marenostrum5 -N 2 -A ehpc1",
        "--gres=gpu:4 --cpus-per-task=80 --qos=acc_ehpc",
        "--partition --gpus",
    ),
    Row(
        "CINECA",
        "--site leonardo -N 2 -A EUHPC_1 -q boost_qos_dbg",
        "--partition=boost_usr_prod --qos=boost_qos_dbg --gpus-per-node=4",
    ),
    Row(
        "JSC",
        "slurm -N 2 --gpus-per-node 4 -A abc -p booster --directive=--gres=gpu:{gpus} --launch-option=--mpi=pspmix",
        "--gres=gpu:4 --partition=booster",
        "--gpus",
    ),
    Row("CSCS", "--site daint -N 2 -A abc", "--nodes=2 --gpus-per-node=4", "--environment --network"),
    Row(
        "SDSC",
        "slurm --gpus 1 -p gpu-shared --shared --cpus-per-gpu 4 --directive=--no-requeue",
        "--gpus=1 --partition=gpu-shared --no-requeue",
        "--requeue --gpus-per-node",
    ),
    Row(
        "Delft",
        "slurm -N 1 --gpus-per-node 1 --directive=--mem-per-cpu=1G",
        "--mem-per-cpu=1G --gpus-per-node=1",
        "--mem=",
    ),
)
