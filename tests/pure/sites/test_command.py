"""The commands of `launch`, over launchers, batch systems and options."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.base.streams import PUBLIC
from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites.batch import Allocation
from dask_gpu_mpi.sites.choice import Starter
from dask_gpu_mpi.sites.command import (
    STAGE,
    START,
    Launch,
    Request,
    Stage,
    as_text,
    decide,
    library_command,
    needs_launcher,
)
from dask_gpu_mpi.sites.containers import RUNTIMES, Container
from dask_gpu_mpi.sites.launchers import BY_COMMAND, FOREIGN, LOCAL, MPIRUNS

KINDS = {**BY_COMMAND, "command": FOREIGN, "local": LOCAL, **{each.kind: each for each in MPIRUNS}}
BATCH = {"ENVIRONMENT": "BATCH", "PATH": "/bin"}
TWO, UNEVEN = {"h1": 1, "h2": 1}, {"h1": 2, "h2": 1}
SLURM = Allocation("slurm", 2, 2, job="42")
LAPTOP, FLUX = Allocation("local", 1, 4), Allocation("flux", 2, 2)
ONE = Allocation("slurm", 1, 2, job="42")
THREE_RANKS, PARTS = Allocation("slurm", 2, 3), Allocation("slurm", 3, 3, parts=2)
HOSTS, LSF = Allocation("hosts", 2, 3, UNEVEN), Allocation("lsf", 2, 4, UNEVEN)
PBS = Allocation("pbs", 2, 2, TWO, job="42.s")
FORWARD = "-x DASK_GPU_MPI__WALLTIME_SIGNAL -x PATH"
ALWAYS = "--kill-on-bad-exit=0 --wait=30"
FREE, FREE_IN_FLUX = "--cpu-bind=none", "--exclusive -o cpu-affinity=off -o gpu-affinity=off"


def made(
    where: Allocation,
    kind: str,
    mpi: str = "",
    *,
    environ: dict[str, str] | None = None,
    library: str = "",
    options: tuple[str, ...] = (),
    program: tuple[str, ...] = ("my.py", "a b"),
    cwd: str = "/work",
    root: bool = False,
    is_public: bool = False,
    run_name: str = "",
    **request: Any,
) -> Launch:
    return decide(
        Request(options, program, **request),
        BATCH if environ is None else environ,
        where,
        library,
        Starter(KINDS[kind], kind, mpi),
        python="/v/python",
        cwd=cwd,
        root=root,
        is_public=is_public,
        run_name=run_name,
    )


@pytest.mark.parametrize(
    ("where", "kind", "mpi", "expected"),
    [
        # one rank a node, all its cores and GPUs for it
        (SLURM, "srun", "pmix", f"--mpi=pmix {FREE} --nodes=2 --ntasks=2 --ntasks-per-node=1 {ALWAYS}"),
        (SLURM, "srun", "", f"{FREE} --nodes=2 --ntasks=2 --ntasks-per-node=1 {ALWAYS}"),
        (THREE_RANKS, "srun", "", f"{FREE} --nodes=2 --ntasks=3 --ntasks-per-node=2 {ALWAYS}"),
        (PARTS, "srun", "pmi2", f"--mpi=pmi2 {FREE} --het-group=0-1 {ALWAYS}"),
        (SLURM, "openmpi", "", f"-np 2 --map-by ppr:1:node --bind-to none {FORWARD}"),
        (SLURM, "hydra", "", "-n 2 -ppn 1 -bind-to none"),
        (PBS, "openmpi", "", "-np 2 --host h1:1,h2:1 --map-by slot --bind-to none -x PATH"),
        (PBS, "hydra", "", "-n 2 -hosts h1:1,h2:1 -bind-to none"),
        (PBS, "intel", "", "-n 2 -hosts h1,h2 -ppn 1 -bind-to none"),
        (PBS, "pals", "", "-n 2 --ppn 1 --cpu-bind none"),
        (HOSTS, "hydra", "", "-n 3 -hosts h1:2,h2:1 -bind-to none"),
        (FLUX, "flux", "pmix", f"run --nodes=2 --tasks-per-node=1 {FREE_IN_FLUX} -o pmi=pmix"),
        (replace(FLUX, ranks=3), "flux", "", f"run --nodes=2 --ntasks=3 {FREE_IN_FLUX}"),
        # a laptop: more ranks than cores, and all variables are there
        (LAPTOP, "openmpi", "", "-np 4 --map-by slot:OVERSUBSCRIBE --bind-to none"),
        (LAPTOP, "hydra", "", "-n 4 -bind-to none"),
    ],
)
def test_options_of_the_launcher(where: Allocation, kind: str, mpi: str, expected: str) -> None:
    words = made(where, kind, mpi).run
    assert shlex.join(words[: words.index("/v/python")]) == f"{kind} {expected}"


@pytest.mark.parametrize(
    ("kind", "mpi", "library", "added"),
    [
        ("srun", "pmi2", "MPICH Version: 5.0.2", ["--no-kill", "--wait=0"]),
        ("srun", "pmix", "Open MPI v5.0.11", ["--no-kill", "--wait=0"]),
        ("openmpi", "", "Open MPI v5.0.11", ["--with-ft", "ulfm"]),
        ("openmpi", "", "Open MPI v4.1.4", []),
        ("hydra", "", "MPICH Version: 5.0.2", []),
        ("pals", "", "MPI VERSION    : CRAY MPICH version 8.1", ["--no-abort-on-failure"]),
    ],
)
def test_ranks_that_may_be_lost(kind: str, mpi: str, library: str, added: list[str]) -> None:
    """The launcher goes on if it can; and the exit code is the script's, whatever the launcher makes of the lost rank."""
    plain, launch = (made(SLURM, kind, mpi, library=library, tolerates=count) for count in (0, 1))
    place = plain.run.index("/v/python")
    assert list(launch.run) == [*plain.run[:place], *added, *plain.run[place:]]
    assert launch.mark == "logs/42/ended"


@pytest.mark.parametrize(("kind", "mpi"), [("srun", "pmix"), ("hydra", "")])
def test_launcher_that_can_not_start_a_heterogeneous_job(kind: str, mpi: str) -> None:
    with pytest.raises(LauncherError, match=f"heterogeneous jobs of Slurm .* {kind}"):
        made(PARTS, kind, mpi)


@pytest.mark.parametrize(
    ("where", "kind", "given", "gone"),
    [
        (SLURM, "srun", ("--cpu-bind=cores", "--mem-bind=local"), "--cpu-bind=none"),
        (SLURM, "openmpi", ("--bind-to", "core", "-x", "MINE"), "--bind-to none "),
        (SLURM, "hydra", ("-bind-to", "core"), "-bind-to none"),
        (FLUX, "flux", ("--signal=USR1@120", "-o", "cpu-affinity=on"), ""),
    ],
)
def test_options_for_the_launcher_win(
    where: Allocation, kind: str, given: tuple[str, ...], gone: str
) -> None:
    """They are the last ones before the ranks' command, and an mpirun refuses most options that are there twice."""
    plain = made(where, kind).run
    launch = made(where, kind, launcher_options=given, check=True)
    at = plain.index("/v/python")
    ours = shlex.join(plain[:at])
    assert gone in ours
    for words in (launch.run, launch.check):
        end = words.index("/v/python")
        assert words[end - len(given) : end] == given
        assert shlex.join(words[: end - len(given)]) == " ".join(ours.replace(gone, "").split())


def test_a_profiler_is_around_each_rank_of_the_job() -> None:
    nsys = made(SLURM, "srun", "pmix", profile=("nsys",), check=True)
    at = nsys.run.index("/v/python")
    assert nsys.run[at - 7 : at - 5] == ("nsys", "profile")
    assert nsys.run[at - 1] == "--output=logs/42/rank-%q{SLURM_PROCID}-%h"
    # it does not make the folder, and others may read its files
    assert (nsys.make, nsys.private) == ("logs/42", True)
    assert "mkdir -p -m 700 logs/42" in as_text(nsys)
    assert "nsys" not in nsys.check
    assert "nsys" not in made(SLURM, "srun", "pmix", profile=("nsys",), command="plan").run
    own = made(SLURM, "srun", "pmix", profile=("perf", "record", "-o", "a b")).run
    assert own[own.index("/v/python") - 4 : own.index("/v/python")] == ("perf", "record", "-o", "a b")
    container = inside("pyxis", "/i.sqsh")
    words = made(SLURM, "srun", "pmi2", cwd="/w", container=container, profile=("perf",)).run
    assert words[words.index("python") - 1] == "perf"


def test_preflight_has_the_options_of_the_job() -> None:
    launch = made(PBS, "pals", check=True, expect_gpus=4, options=("--interface", "ib0"))
    at = launch.check.index("/v/python")
    assert launch.check[at + 1 : at + 3] == ("-c", START)
    assert shlex.join(launch.check[at + 3 :]) == "check --expect-gpus=4 --interface ib0 my.py 'a b'"
    assert made(PBS, "pals").check == ()


@pytest.mark.parametrize(
    ("where", "given", "environ", "logs", "own"),
    [
        (SLURM, "", {}, "logs/42", True),
        (SLURM, "mine", {}, "mine", False),
        (SLURM, "", {"DASK_GPU_MPI__LOG_DIRECTORY": "theirs"}, "theirs", False),
        (SLURM, "", {"DGM_LOGS": "/site", "DASK_GPU_MPI__LOG_DIRECTORY": "theirs"}, "theirs", False),
        (SLURM, "", {"DGM_LOGS": "/site"}, "/site/42", True),
        (SLURM, "", {"DGM_LOGS": ""}, "logs/42", True),
        (LAPTOP, "", {"DGM_LOGS": "/site"}, "", False),
    ],
)
def test_log_folder_of_the_job(
    where: Allocation, given: str, environ: dict[str, str], logs: str, own: bool
) -> None:
    """`own`: the ranks are told of it, as they are not by the user."""
    launch = made(where, "openmpi", environ=environ, log_directory=given)
    assert launch.logs == logs
    assert (f"--log-directory {logs}" in shlex.join(launch.run)) == own


def test_mark_of_a_job_that_has_completed() -> None:
    """An mpirun may exit with 0 when it has lost a node, or wait for that. On one node there is no other."""
    assert made(SLURM, "openmpi").mark == "logs/42/ended"
    assert made(PBS, "hydra").mark == "logs/42.s/ended"
    # another run may have the same folder, and nobody else knows the name
    named = made(SLURM, "openmpi", run_name="5e8f")
    assert (named.mark, named.environment["DGM_RUN"]) == ("logs/42/ended-5e8f", "5e8f")
    assert "DGM_RUN" in named.run  # of the variables that mpirun takes to other nodes
    assert made(SLURM, "srun").mark == ""
    assert made(SLURM, "srun", run_name="5e8f").environment["DGM_RUN"] is None
    assert made(Allocation("slurm", 1, 1, job="42"), "openmpi").mark == ""
    for command in ("plan", "check"):
        assert made(SLURM, "openmpi", command=command, program=(), tolerates=1).mark == ""


@pytest.mark.parametrize(
    ("where", "kind", "environ", "end", "warning"),
    [
        (SLURM, "srun", BATCH, False, True),  # Slurm tells the ranks itself
        (SLURM, "srun", {}, True, True),
        (SLURM, "openmpi", BATCH, True, True),
        (PBS, "openmpi", {}, True, True),
        (LSF, "openmpi", {}, False, False),  # LSF tells all processes
        (LAPTOP, "hydra", {}, True, True),
    ],
)
def test_who_is_told_of_signals(
    where: Allocation, kind: str, environ: dict[str, str], end: bool, warning: bool
) -> None:
    launch = made(where, kind, environ=environ)
    assert (launch.ranks, launch.tolerant) == (0, False)
    assert (launch.forwards_end, not launch.batch.signals_all) == (end, warning)
    # what a batch script of Slurm has started on other nodes ends with the script
    assert launch.lingers == (where is SLURM and kind == "openmpi")
    # a step beside the shell of an interactive job
    assert ("--overlap" in launch.run) == (kind == "srun" and environ is not BATCH)


def test_ranks_without_a_launcher() -> None:
    """The commands are those of one rank."""
    launch = made(LAPTOP, "local", check=True, expect_gpus=1, options=("--interface", "lo"), tolerates=1)
    assert launch.run == ("/v/python", "-c", START, "run", "--interface", "lo", "my.py", "a b")
    assert launch.check == ("/v/python", "-c", START, "check", "--expect-gpus=1", *launch.run[4:])
    assert (launch.ranks, launch.tolerant, launch.forwards_end, launch.lingers) == (4, True, True, False)
    assert launch.mark == ""
    text = as_text(launch)
    assert text.startswith(
        "# without a launcher: launch itself starts 4 ranks by the last command, and sets DGM_RANK,"
    )
    assert text.endswith(f"&&\n{shlex.join(launch.run)}")
    launch = made(ONE, "local", environ={"SLURM_JOB_ID": "42"}, tolerates=1, profile=("nsys",))
    assert launch.mark == "logs/42/ended"
    assert launch.run[:2] == ("nsys", "profile")
    assert launch.run[6:8] == ("--output=logs/42/rank-%q{DGM_RANK}-%h", "/v/python")
    launch = made(Allocation("lsf", 1, 2, {"h1": 2}), "local")
    assert not launch.forwards_end  # LSF tells the ranks itself
    launch = made(LAPTOP, "local", container=inside("apptainer", "/i.sif"), cwd="/w")
    assert launch.run[:3] == ("apptainer", "exec", "--nv")
    assert launch.run[launch.run.index("python") - 1] == "/i.sif"


HERE = os.uname().nodename
SHELL = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1"}


@pytest.mark.parametrize(
    ("where", "environ", "needs"),
    [
        (LAPTOP, {}, False),
        (Allocation("hosts", 1, 2, {"localhost": 2}), {}, False),
        (Allocation("hosts", 1, 2, {HERE: 2}), {}, False),
        (Allocation("hosts", 1, 2, {"another-host": 2}), {}, True),
        (HOSTS, {}, True),
        # a shell on the node: of `salloc`, or of `srun --pty`
        (ONE, SHELL, False),
        (ONE, SHELL | {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"}, False),
        # a shell on the login node; in another job; on the first of two nodes
        (ONE, SHELL | {"SLURMD_NODENAME": ""}, True),
        (ONE, SHELL | {"SLURMD_NODENAME": "n7"}, True),
        (ONE, SHELL | {"SLURM_JOB_NODELIST": "n[1-2]"}, True),
        (replace(ONE, parts=1), SHELL, True),
        # Slurm sends no signals to a batch script
        (ONE, SHELL | {"ENVIRONMENT": "BATCH"}, True),
        (SLURM, SHELL, True),
        (Allocation("pbs", 1, 2, {HERE: 2}, job="1"), {}, False),
        (Allocation("pbs", 1, 2, {"another-host": 2}, job="1"), {}, True),
        (Allocation("lsf", 1, 2, {HERE: 2}, job="1"), {}, False),
        (Allocation("sge", 1, 2, {HERE: 2}, job="1"), {}, False),
        (Allocation("sge", 1, 2, {"another-host": 2}, job="1"), {}, True),
        (Allocation("sge", 1, 1, job="1"), {}, False),
        (Allocation("flux", 1, 2, job="f1"), {"HOST": HERE}, False),
        (Allocation("flux", 1, 2, job="f1"), {"HOST": "another-host"}, True),
        (Allocation("flux", 1, 2, job="f1"), {"HOST": ""}, True),
    ],
)  # fmt: skip
def test_a_launcher_is_needed_on_another_node(
    where: Allocation, environ: dict[str, str], needs: bool
) -> None:
    def ask(command: Any) -> str:
        assert command == ["flux", "getattr", "hostlist"]
        return environ["HOST"] + "\n"

    assert needs_launcher(Request((), ("my.py",)), environ, where, ask, chosen=False) is needs
    assert needs_launcher(Request((), ("my.py",)), environ, where, ask, chosen=True)


def test_options_that_need_a_launcher() -> None:
    def needs(**given: Any) -> bool:
        request = Request((), ("my.py",), **given)
        return needs_launcher(request, {}, LAPTOP, lambda _: "", chosen=False)

    assert needs(launcher_options=("--bind-to", "core"))
    assert needs(stage=COPY)
    for runtime in RUNTIMES:  # some give a rank only the variables that they know
        assert needs(container=inside(runtime.name)) is (runtime.name not in ("apptainer", "singularity"))
    assert not needs(profile=("nsys",), check=True, tolerates=1, log_directory="logs")


def inside(runtime: str, image: str = "im age", **given: Any) -> Container:
    return Container(next(each for each in RUNTIMES if each.name == runtime), image, **given)


def test_container_has_the_folders_of_the_job(tmp_path: Path) -> None:
    code, scratch = tmp_path / "code", tmp_path / "scratch"
    for folder in (code, scratch, tmp_path / "cwd", tmp_path / "setup"):
        folder.mkdir()
    (tmp_path / "link").symlink_to(scratch)
    script = code / "my.py"
    script.touch()

    def mounts(mine: tuple[str, ...] = (), **given: Any) -> list[str]:
        launch = made(PBS, "hydra", container=inside("apptainer", mounts=mine), **given)
        assert launch.make
        return [word.removeprefix("--bind=") for word in launch.run if word.startswith("--bind=")]

    cwd = str(tmp_path / "cwd")
    names = ("code", "cwd", "cwd/logs", "scratch")
    found = mounts(program=(str(script), "x"), cwd=cwd, environ={}, local_directory=str(scratch))
    assert found == [f"{tmp_path / name}:{tmp_path / name}" for name in names]
    # what a job script names, as it names it
    environ = {
        "DGM_SETUP": f"{tmp_path}/setup/env.sh",
        "DGM_LOGS": f"{tmp_path}/setup/../logs",
    }
    found = mounts(cwd=cwd, environ=environ, local_directory=f"{tmp_path}/link")
    assert found == [f"{tmp_path / name}:{tmp_path / name}" for name in ("cwd", "link", "logs", "setup")]
    # workers make it on each node: nothing to mount here
    assert not any("/gone" in one for one in mounts(local_directory="/gone"))
    # the user's come first, and instead of ours
    found = mounts(("/data:/mnt:ro", f"/other:{cwd}"), cwd=cwd, environ={})
    assert found == ["/data:/mnt:ro", f"/other:{cwd}", f"{cwd}/logs:{cwd}/logs"]
    with pytest.raises(LauncherError, match="apptainer can't mount .* Fix: another directory"):
        mounts(cwd="/a,b")


PODMAN = "podman-hpc run --rm --interactive --entrypoint= --gpu{} --network=host --pid=host --ipc=host --workdir=/w"
VARIABLES = "CUDA_VISIBLE_DEVICES DASK_* DGM_* NCCL_* OMP_NUM_THREADS PMI2_* PMIX_* PMI_* RAPIDS_* SLURMD_* SLURM_* UCX_*"
ALONE = "srun --nodes=1 --ntasks=1 --mpi=none"


@pytest.mark.parametrize(
    ("runtime", "image", "environ", "expected", "alone"),
    [
        ("singularity", "img", {}, "singularity exec --nv --bind=/w:/w --bind=/w/logs:/w/logs img",
         "singularity exec --nv --bind=/w:/w img"),
        ("shifter", "img", {}, "shifter --image=img --module=gpu --", "shifter --image=img --module=gpu --"),
        ("shifter", "img", {"SHIFTER_MODULE": "none"}, "shifter --image=img --", "shifter --image=img --"),
        ("podman-hpc", "img", {},
         f"{PODMAN.format(' --openmpi-pmix')} --volume=/tmp:/tmp --volume=/w:/w --volume=/w/logs:/w/logs "
         f"{' '.join(f'--env={name}' for name in VARIABLES.split())} -- img",
         f"{PODMAN.format('')} --volume=/tmp:/tmp --volume=/w:/w -- img"),
        # srun itself starts these; with an option of CSCS the ranks' Python is the image's, too
        ("pyxis", "/i.sqsh", {},
         "--container-image=/i.sqsh --container-mounts=/tmp:/tmp,/w:/w,/w/logs:/w/logs --container-workdir=/w",
         f"{ALONE} --container-image=/i.sqsh --container-mounts=/tmp:/tmp,/w:/w --container-workdir=/w"),
        ("srun", "--environment=/e.toml", {}, "--environment=/e.toml env --chdir=/w",
         f"{ALONE} --environment=/e.toml env --chdir=/w"),
    ],
)  # fmt: skip
def test_command_of_a_rank_in_a_container(
    runtime: str, image: str, environ: dict[str, str], expected: str, alone: str
) -> None:
    """What finds the MPI library is run in the same way, but is no rank."""
    container, environ = inside(runtime, image), BATCH | environ
    launch = made(SLURM, "srun", "pmix", environ=environ, cwd="/w", container=container, check=True)
    for words in (launch.run, launch.check):
        assert " ".join(words[: words.index("-c")]).endswith(f"--wait=30 {expected} python")
    library = library_command(Request((), (), container=container), environ, "p", "/w")
    assert " ".join(library) == f"{alone} python"


def test_containers_that_srun_starts() -> None:
    container = inside("pyxis", "/i.sqsh", mounts=("/data:/mnt:ro,rprivate",))
    launch = made(SLURM, "srun", "pmi2", container=container, launcher_options=("--container-name=x",))
    assert launch.run[launch.run.index("python") - 1] == "--container-name=x"
    assert any(word.startswith("--container-mounts=/data:/mnt:ro+rprivate,") for word in launch.run)
    # Enroot shows no GPU without them; the user's win
    both = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
    assert {name: launch.environment.get(name) for name in both} == both
    mine = made(SLURM, "srun", environ={**BATCH, "NVIDIA_VISIBLE_DEVICES": "0"}, container=container)
    assert "NVIDIA_VISIBLE_DEVICES" not in mine.environment
    assert "--overlap" in library_command(Request((), (), container=container), {}, "p", "/w")
    with pytest.raises(LauncherError, match=r"openmpi starts the ranks, .* of pyxis \(expected srun\)"):
        made(SLURM, "openmpi", container=container)
    with pytest.raises(LauncherError, match="--container-mount: can't be combined with options of srun"):
        made(SLURM, "srun", container=inside("srun", "--environment=/e.toml", mounts=("/a:/a",)))


def test_command_that_starts_the_ranks_by_itself() -> None:
    launch = made(SLURM, "command", launcher_options=("-v",), options=("--report=x",))
    assert launch.run[:2] == ("command", "-v")
    assert launch.run[launch.run.index("run") + 1 :][:2] == ("--log-directory", "logs/42")
    assert not launch.mark


def test_text_to_paste(tmp_path: Path) -> None:
    launch = Launch(
        {"ADDED": "a 'b'\nc", "REMOVED": None},
        check=("sh", "-c", 'echo "$ADDED${REMOVED-gone}"'),
        run=("sh", "-c", 'printf "%s|" "$@"; exit 7', "sh", "a b", "$HOME", "é'"),
        stage=("echo", "staged"),
        unstage=("echo", "removed"),
        make=str(tmp_path / "made here"),
    )
    text = as_text(launch, "a note\nrm -r /")
    assert text.startswith("# a note rm -r /\nexport ADDED=")
    done = subprocess.run(
        ["bash", "-c", text], env={"REMOVED": "1", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (7, "staged\na 'b'\ncgone\na b|$HOME|é'|removed\n")
    assert (tmp_path / "made here").is_dir()


@pytest.mark.parametrize("kind", ["srun", "hydra", "openmpi"])
def test_ranks_on_other_nodes_are_told_that_others_may_read_their_output(kind: str) -> None:
    launch = made(SLURM, kind, is_public=True, check=True)
    assert launch.environment[PUBLIC] == "1"
    # Open MPI forwards nothing by itself
    pairs = [*zip(launch.run, launch.run[1:], strict=False)]
    assert (("-x", PUBLIC) in pairs) == (kind == "openmpi")
    private = made(SLURM, kind)
    assert PUBLIC not in private.environment
    assert PUBLIC not in private.run


COPY = Stage("/sw/env.tar", "/nvme/dgm-stage-1", 7, "abc")


@pytest.mark.parametrize(
    ("where", "kind", "expected"),
    [
        (Allocation("slurm", 2, 8, job="42"), "srun", "--nodes=2 --ntasks=2 --ntasks-per-node=1"),
        (HOSTS, "hydra", "-n 2 -hosts h1:1,h2:1"),
        (HOSTS, "openmpi", "-np 2 --host h1:1,h2:1"),
    ],
)
def test_one_process_a_node_makes_the_copy_and_one_removes_it(
    where: Allocation, kind: str, expected: str
) -> None:
    launch = made(where, kind, stage=COPY, check=True, library="Open MPI v5.0.11, package: x\0")
    for command in (launch.stage, launch.unstage):
        assert f" {expected} " in shlex.join(command)
    assert launch.stage[launch.stage.index("/v/python") :] == (
        *("/v/python", "-c", STAGE),
        *("/sw/env.tar", "/nvme/dgm-stage-1", "7", "abc", "Open MPI v5.0.11, package: x"),
    )
    assert launch.unstage[-4:] == ("/v/python", "-c", STAGE, "/nvme/dgm-stage-1")
    # one process may need longer than another
    assert kind != "srun" or [word for word in launch.unstage if "--wait" in word][-1] == "--wait=0"
    for command in (launch.check, launch.run):
        assert "/nvme/dgm-stage-1/env/bin/python" in command
        assert "/v/python" not in command
    launch = made(where, kind)
    assert (launch.stage, launch.unstage) == ((), ())
