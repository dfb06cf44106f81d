"""The commands of `launch`, over launchers, batch systems and options."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dask_gpu_mpi.base.streams import PUBLIC
from dask_gpu_mpi.errors import LauncherError
from dask_gpu_mpi.sites.batch import AllocatedHost, Allocation
from dask_gpu_mpi.sites.command import START, Launch, Request, as_text, decide, python_command
from dask_gpu_mpi.sites.starter import MpiLibrary, Starter

BATCH = {"ENVIRONMENT": "BATCH", "PATH": "/bin"}
TWO = (AllocatedHost("h1", 1), AllocatedHost("h2", 1))
UNEVEN = (AllocatedHost("h1", 2), AllocatedHost("h2", 1))
SLURM = Allocation("slurm", 2, 2, job="42", requeue_as="42")
PBS = Allocation("pbs", 2, 2, TWO, job="42.s", requeue_as="42.s")
FORWARD = "-x DASK_GPU_MPI__WALLTIME_SIGNAL -x PATH"
ALWAYS = "--kill-on-bad-exit=0 --wait=30"


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
    **request: Any,
) -> Launch:
    return decide(
        Request(options, program, **request),
        BATCH if environ is None else environ,
        where,
        MpiLibrary(library),
        Starter(kind, kind),
        mpi,
        python="/v/python",
        cwd=cwd,
        root=root,
        is_public=is_public,
    )


@pytest.mark.parametrize(
    ("where", "kind", "mpi", "expected"),
    [
        # one rank a node, all its cores and GPUs for it
        (
            SLURM,
            "srun",
            "pmix",
            f"--mpi=pmix --cpu-bind=none --nodes=2 --ntasks=2 --ntasks-per-node=1 {ALWAYS}",
        ),
        (SLURM, "srun", "", f"--cpu-bind=none --nodes=2 --ntasks=2 --ntasks-per-node=1 {ALWAYS}"),
        (
            Allocation("slurm", 2, 3),
            "srun",
            "",
            f"--cpu-bind=none --nodes=2 --ntasks=3 --ntasks-per-node=2 {ALWAYS}",
        ),
        (
            Allocation("slurm", 3, 3, parts=2),
            "srun",
            "pmi2",
            f"--mpi=pmi2 --cpu-bind=none --het-group=0-1 {ALWAYS}",
        ),
        (SLURM, "openmpi", "", f"-np 2 --map-by ppr:1:node --bind-to none {FORWARD}"),
        (SLURM, "hydra", "", "-n 2 -ppn 1 -bind-to none"),
        (PBS, "openmpi", "", "-np 2 --host h1:1,h2:1 --map-by slot --bind-to none -x PATH"),
        (PBS, "hydra", "", "-n 2 -hosts h1:1,h2:1 -bind-to none"),
        (PBS, "intel", "", "-n 2 -hosts h1,h2 -ppn 1 -bind-to none"),
        (PBS, "pals", "", "-n 2 --ppn 1 --cpu-bind none"),
        (Allocation("hosts", 2, 3, UNEVEN), "hydra", "", "-n 3 -hosts h1:2,h2:1 -bind-to none"),
        # LSF's list of nodes may have the one of the job script as well, which gets no ranks
        (
            Allocation("lsf", 2, 4, UNEVEN),
            "jsrun",
            "",
            "-n ALL_HOSTS -r 1 -a 2 -c ALL_CPUS -g ALL_GPUS -b none",
        ),
        (
            Allocation("lsf", 2, 4, UNEVEN, whole=False),
            "jsrun",
            "",
            "-n 2 -r 1 -a 2 -c ALL_CPUS -g ALL_GPUS -b none",
        ),
        (
            Allocation("flux", 2, 2),
            "flux",
            "pmix",
            "run --nodes=2 --tasks-per-node=1 --exclusive -o cpu-affinity=off -o gpu-affinity=off -o pmi=pmix",
        ),
        (
            Allocation("flux", 2, 3),
            "flux",
            "",
            "run --nodes=2 --ntasks=3 --exclusive -o cpu-affinity=off -o gpu-affinity=off",
        ),
        # a laptop: more ranks than cores, and all variables are there
        (Allocation("local", 1, 4), "openmpi", "", "-np 4 --map-by slot:OVERSUBSCRIBE --bind-to none"),
        (Allocation("local", 1, 4), "hydra", "", "-n 4 -bind-to none"),
    ],
)
def test_options_of_the_launcher(where: Allocation, kind: str, mpi: str, expected: str) -> None:
    words = made(where, kind, mpi).run
    assert shlex.join(words[: words.index("/v/python")]) == f"{kind} {expected}"


@pytest.mark.parametrize(
    ("kind", "mpi", "library", "added"),
    [
        ("srun", "pmi2", "MPICH Version: 5.0.2", ["--no-kill", "--wait=0"]),
        ("srun", "pmix", "Open MPI v5.0.11", []),
        ("openmpi", "", "Open MPI v5.0.11", ["--with-ft", "ulfm"]),
        ("openmpi", "", "Open MPI v4.1.4", []),
        ("hydra", "", "MPICH Version: 5.0.2", []),
    ],
)
def test_ranks_that_may_be_lost(kind: str, mpi: str, library: str, added: list[str]) -> None:
    """The launcher goes on if it can; and the exit code is the script's, whatever the launcher makes of the lost rank."""
    plain, launch = (made(SLURM, kind, mpi, library=library, tolerates=count) for count in (0, 1))
    place = plain.run.index("/v/python")
    assert list(launch.run) == [*plain.run[:place], *added, *plain.run[place:]]
    assert launch.mark == "logs/42/ended"
    assert made(SLURM, kind, mpi, tolerates=1, command="plan").mark == ""


def test_step_beside_the_shell_of_an_interactive_job() -> None:
    assert "--overlap" in made(SLURM, "srun", environ={}).run
    assert "--overlap" not in made(SLURM, "srun").run


@pytest.mark.parametrize(
    ("where", "kind", "mpi", "message"),
    [
        (
            Allocation("slurm", 3, 3, parts=2),
            "srun",
            "pmix",
            "heterogeneous jobs of Slurm .* srun --mpi=pmix",
        ),
        (Allocation("slurm", 3, 3, parts=2), "hydra", "", "heterogeneous jobs of Slurm .* hydra"),
        (Allocation("lsf", 2, 3, UNEVEN), "jsrun", "", "jsrun can't start 3 ranks on 2 nodes"),
    ],
)
def test_refused(where: Allocation, kind: str, mpi: str, message: str) -> None:
    with pytest.raises(LauncherError, match=message):
        made(where, kind, mpi)


def test_signal_before_the_walltime_by_flux() -> None:
    flux = Allocation("flux", 2, 2)
    launch = made(flux, "flux", "pmix", signal="USR1@120", check=True)
    for words in (launch.run, launch.check):
        assert words[words.index("/v/python") - 1] == "--signal=USR1@120"
    assert not any("signal" in word for word in made(flux, "flux").run)
    with pytest.raises(LauncherError, match="--signal USR1@120: srun sends none"):
        made(SLURM, "srun", signal="USR1@120")


def test_preflight_has_the_options_of_the_job() -> None:
    launch = made(PBS, "pals", check=True, expect_gpus=4, options=("--interface", "ib0"))
    inner = launch.check[launch.check.index("/v/python") :]
    assert inner[1:] == (
        "-c",
        START,
        "check",
        "--expect-gpus=4",
        "--interface",
        "ib0",
        "my.py",
        "a b",
    )
    assert made(PBS, "pals").check == ()


def test_another_command_than_run() -> None:
    plan = made(PBS, "pals", command="plan", options=("--name", "x"), program=("--json",)).run
    assert plan[plan.index(START) + 1 :] == ("plan", "--name", "x", "--json")
    check = made(PBS, "pals", command="check", program=(), expect_gpus=4).run
    assert check[check.index(START) + 1 :] == ("check", "--expect-gpus=4")


def test_log_folder_of_the_job() -> None:
    def logs(where: Allocation, **given: Any) -> tuple[str, list[str]]:
        launch = made(where, "openmpi", **given)
        return launch.logs, [
            launch.run[i + 1] for i, word in enumerate(launch.run) if word == "--log-directory"
        ]

    assert logs(SLURM) == ("logs/42", ["logs/42"])
    assert logs(SLURM, options=("--log-directory", "mine"), log_directory="mine") == ("mine", ["mine"])
    assert logs(SLURM, environ={"DASK_GPU_MPI__LOG_DIRECTORY": "theirs"}) == ("theirs", [])
    assert logs(Allocation("local", 1, 4)) == ("", [])
    of_site = {"DGM_LOGS": "/site/logs"}
    assert logs(SLURM, environ=of_site) == ("/site/logs/42", ["/site/logs/42"])
    assert logs(SLURM, environ={"DGM_LOGS": ""}) == ("logs/42", ["logs/42"])
    assert logs(SLURM, environ={**of_site, "DASK_GPU_MPI__LOG_DIRECTORY": "theirs"}) == ("theirs", [])
    assert logs(Allocation("local", 1, 4), environ=of_site) == ("", [])


def test_local_directory_of_a_job_script() -> None:
    environ = {"DGM_SCRATCH": "/nvme", "DASK_GPU_MPI__LOCAL_DIRECTORY": "/tmp"}
    launch = made(SLURM, "openmpi", environ=environ)
    assert launch.environment["DASK_GPU_MPI__LOCAL_DIRECTORY"] == "/nvme"
    assert "DASK_GPU_MPI__LOCAL_DIRECTORY" in launch.run  # Open MPI takes it along
    environ["DGM_SCRATCH"] = ""
    assert "DASK_GPU_MPI__LOCAL_DIRECTORY" not in made(SLURM, "srun", environ=environ).environment


def test_mark_of_a_job_that_has_completed() -> None:
    """Open MPI's mpirun exits with 0 when it has lost a daemon, of which there is none on one node."""
    assert made(SLURM, "openmpi").mark == "logs/42/ended"
    assert made(SLURM, "openmpi", command="check").mark == ""
    assert made(SLURM, "srun").mark == made(PBS, "hydra").mark == ""
    assert made(Allocation("slurm", 1, 1, job="42"), "openmpi").mark == ""


@pytest.mark.parametrize("command", ["plan", "check"])
def test_commands_that_leave_no_mark(command: str) -> None:
    assert made(SLURM, "openmpi", command=command, program=()).mark == ""


@pytest.mark.parametrize(
    ("where", "kind", "environ", "end", "warning"),
    [
        (SLURM, "srun", BATCH, False, True),  # Slurm tells the ranks itself
        (SLURM, "srun", {}, True, True),
        (SLURM, "openmpi", BATCH, True, True),
        (PBS, "openmpi", {}, True, True),
        (Allocation("lsf", 2, 2, TWO), "openmpi", {}, False, False),  # LSF tells all processes
        (Allocation("local", 1, 4), "hydra", {}, True, True),
    ],
)
def test_who_is_told_of_signals(
    where: Allocation, kind: str, environ: dict[str, str], end: bool, warning: bool
) -> None:
    launch = made(where, kind, environ=environ)
    assert (launch.forwards_end, launch.forwards_warning) == (end, warning)
    # what a batch script of Slurm has started on other nodes ends with the script
    assert launch.lingers == (where is SLURM and kind == "openmpi")


def test_container_has_the_folders_of_the_job(tmp_path: Path) -> None:
    code, scratch = tmp_path / "code", tmp_path / "scratch"
    for folder in (code, scratch, tmp_path / "cwd", tmp_path / "setup"):
        folder.mkdir()
    (tmp_path / "link").symlink_to(scratch)
    script = code / "my.py"
    script.touch()
    launch = made(
        PBS,
        "hydra",
        container="im age.sif",
        program=(str(script), "x"),
        cwd=str(tmp_path / "cwd"),
        environ={"DASK_GPU_MPI__LOCAL_DIRECTORY": str(scratch)},
    )
    at = launch.run.index("apptainer")
    binds = [f"--bind={tmp_path / name}" for name in ("code", "cwd", "cwd/logs", "scratch")]
    assert list(launch.run[at : at + 9]) == ["apptainer", "exec", "--nv", *binds, "im age.sif", "python"]
    assert launch.make == "logs/42.s"
    # what a job script names, as it names it
    environ = {
        "DGM_SCRATCH": f"{tmp_path}/link",
        "DGM_SETUP": f"{tmp_path}/setup/env.sh",
        "DGM_LOGS": f"{tmp_path}/setup/../logs",
    }
    launch = made(PBS, "hydra", container="i", cwd=str(tmp_path / "cwd"), environ=environ)
    found = [word for word in launch.run if word.startswith("--bind=")]
    assert found == [f"--bind={tmp_path / name}" for name in ("cwd", "link", "logs", "setup")]
    # workers make it on each node: nothing to bind here
    gone = made(PBS, "hydra", container="i", environ={"DASK_GPU_MPI__LOCAL_DIRECTORY": "/gone"})
    assert not any("/gone" in word for word in gone.run)


def test_text_to_paste(tmp_path: Path) -> None:
    launch = Launch(
        {"ADDED": "a 'b'\nc", "REMOVED": None},
        check=("sh", "-c", 'echo "$ADDED${REMOVED-gone}"'),
        run=("printf", "%s|", "a b", "$HOME", "é'"),
        make=str(tmp_path / "made here"),
    )
    text = as_text(launch, "a note")
    assert text.startswith("# a note\nexport ADDED=")
    done = subprocess.run(
        ["bash", "-c", text], env={"REMOVED": "1", "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "a 'b'\ncgone\na b|$HOME|é'|")
    assert (tmp_path / "made here").is_dir()


@pytest.mark.parametrize("place", ["/a,b", "/a:b"])
def test_directory_that_apptainer_can_not_bind(place: str) -> None:
    with pytest.raises(LauncherError, match="apptainer can't bind .* Fix: another directory"):
        python_command(Request((), ("my.py",), container="image"), {}, "python", place, "")


def test_notes_are_one_line_each() -> None:
    assert as_text(Launch({}, (), ("true",)), "job 1\nrm -r /").splitlines() == ["# job 1 rm -r /", "true"]


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
