"""The generator of job scripts: what it writes, refuses, quotes and submits."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from functools import partial
from pathlib import Path

import dask.config
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from dask_gpu_mpi.cli.main import cli
from dask_gpu_mpi.options.resolve import resolve
from dask_gpu_mpi.sites.batch import SYSTEMS, JobRequest, batch_system
from dask_gpu_mpi.sites.jobscript import SCRIPTED, render, template
from support.jobs.processes import run_python
from support.mocks import inputs
from support.mocks.batch import ENVIRON, FakeBatch, directives

LAUNCHERS = [(system, launcher) for system in SCRIPTED for launcher in batch_system(system).templates]
SHAPE = ("--nodes", "2", "--gpus-per-node", "4", "--time", "01:30:10")
#: Runs the command.
command = partial(inputs.command, "jobscript")
HOSTILE = 'it\'s "$(touch gone)" `touch gone` \\ $HOME; * ~ ! #\t\r\n#SBATCH --nodes=99\n#PBS -q evil\n\x1b é \udcff'


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the script of these jobs."""
    (tmp_path / "my.py").touch()
    (tmp_path / "logs").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def asked(system: str, *words: str, program: tuple[str, ...] = ("my.py",)) -> str:
    return command(system, *SHAPE, *words, "--", *program)


def test_systems_with_templates() -> None:
    assert tuple(name for name in SYSTEMS if batch_system(name).templates) == SCRIPTED


@pytest.mark.parametrize(("system", "launcher"), LAUNCHERS)
def test_script_is_the_template_but_for_directives_and_settings(system: str, launcher: str) -> None:
    made = asked(system, "--launcher", launcher)
    text = template(batch_system(system).templates[launcher])
    prefix = batch_system(system).prefix
    expected = {
        "# 2 nodes, 4 GPUs and 1 rank on each. Made by dask-gpu-mpi jobscript.",
        "program=(my.py)",
        *(f"export DGM_{each}" for each in (f"LAUNCHER={launcher}", "EXPECT_GPUS=4", "RANKS_PER_NODE=1")),
    }
    new = set(made.splitlines()) - set(text.splitlines())
    assert {line for line in new if not line.startswith(prefix)} <= expected
    assert made.startswith("#!/bin/bash\n")
    # batch systems read directives up to the first command
    assert len(directives(made, prefix)) == made.count(f"\n{prefix}")
    assert made.endswith(text.partition("\nset --")[2])


def test_module_that_can_not_be_loaded_ends_the_job(batch: FakeBatch) -> None:
    batch.answers["module"] = ("", 1)
    (batch.directory / "setup").write_text("touch here\n")  # a file of the user's may need the modules
    made = asked("slurm", "--module", "cuda", "--setup", str(batch.directory / "setup"))
    assert "\ntype -t module > /dev/null || source /etc/profile\n" in made
    script = batch.directory / "job"
    script.write_text(made)
    ran = batch.run(script, (), ENVIRON["slurm"])
    assert (ran.rc, ran.program()) == (2, None)
    assert not (batch.directory / "here").exists()


@pytest.mark.parametrize(
    ("system", "words", "expected"),
    [
        (
            "slurm",
            "--account abc --partition gpu,gpu2 --ranks-per-node 2",
            "--nodes=2 --ntasks-per-node=2 --gpus-per-node=4 --time=01:30:10 --account=abc --partition=gpu,gpu2 "
            "--exclusive --mem=0",
        ),
        (
            "pbs",
            "--account abc --queue gpu --cpus-per-node 32 --directive '-l filesystems=home:eagle'",
            "'-l select=2:ncpus=32:mpiprocs=1:ngpus=4' '-l place=scatter:excl' '-l walltime=01:30:10' '-A abc' '-q gpu' "
            "'-l filesystems=home:eagle'",
        ),
        (
            "slurm",
            "--shared --cpus-per-node 16 --ranks-per-node 2 --mem 64G -C 'a&b' --mail-user a@b.c -q debug -o %x.log",
            "--cpus-per-task=8 --mem=65536M '--constraint=a&b' --mail-user=a@b.c --mail-type=END,FAIL --qos=debug "
            "--output=%x.log",
        ),
        (
            "pbs",
            "--shared --cpus-per-node 16 --mem 64G --mail-user a@b.c -q gpu -o logs/",
            "'-l select=2:ncpus=16:mpiprocs=1:ngpus=4:mem=65536mb' '-l place=scatter:shared' '-M a@b.c' '-m ae' '-q gpu' "
            "'-o logs/'",
        ),
        (
            "lsf",
            "--shared --cpus-per-node 16 --mem 64G --mail-user a@b.c --output %J.out",
            """'-n 32' '-R "span[ptile=16] rusage[mem=65536MB/host]"' '-u a@b.c' '-N' '-o %J.out'""",
        ),
        (
            "flux",
            "--shared --cpus-per-node 16 --constraint 'a|b'",
            "--nslots=2 --cores-per-slot=16 --gpus-per-slot=4 '--requires=a|b'",
        ),
        (
            "lsf",
            "--account abc --queue gpu --ranks-per-node 2",
            """'-n 4' '-R "span[ptile=2]"' '-gpu "num=4:mode=shared:j_exclusive=yes"' '-W 01:31' '-P abc' '-q gpu'""",
        ),
        (
            "flux",
            "--account abc --queue gpu",
            "--nodes=2 --exclusive --time-limit=5410s --bank=abc --queue=gpu",
        ),
    ],
)
def test_directives(system: str, words: str, expected: str) -> None:
    found = directives(asked(system, *shlex.split(words)), batch_system(system).prefix)
    assert set(shlex.split(expected)) <= set(found)
    assert len({re.split("[= ]", line.replace("-l ", "-l", 1))[0] for line in found}) == len(found)


@pytest.mark.parametrize(
    ("system", "words", "there", "gone"),
    [
        ("slurm", "--gpus-per-node a100:4", "--gpus-per-node=a100:4", "--gpus-per-node=4"),
        ("slurm", "--directive=--gres=gpu:gh200:4,nvme:9", "--gres=gpu:gh200:4,nvme:9", "--gpus-per-node"),
        ("slurm", "--directive=--gres=nvme:9", "--gpus-per-node=4 --gres=nvme:9", ""),
        ("slurm", "--directive=--gpus=h200:8", "--gpus=h200:8", "--gpus-per-node"),
        ("slurm", "--directive='-G 8'", "'-G 8'", "--gpus-per-node"),
        # sites that refuse these (TACC, VUB)
        (
            "slurm",
            "--directive=--gpus-per-node= --directive=--mem=",
            "--exclusive",
            "--gpus-per-node --gres --mem",
        ),
        ("slurm", "--directive=--mem-per-cpu=1G", "--mem-per-cpu=1G", "--mem="),
        (
            "slurm",
            "--directive=--no-requeue --directive=--exclusive=user",
            "--no-requeue --exclusive=user",
            "--requeue",
        ),
        ("slurm", "-p gpu --directive='-p big'", "'-p big'", "--partition"),
        ("slurm", "--cpus-per-node 48 --ranks-per-node 2", "--exclusive --cpus-per-task=24", ""),
        (
            "pbs",
            "--cpus-per-node 64 --directive='-l select=2:ncpus=64:ngpus=4:gpu_type=a100' --directive='-l place='",
            "'-l select=2:ncpus=64:ngpus=4:gpu_type=a100'",
            "'-l select=2:ncpus=64:mpiprocs' '-l place'",
        ),
        ("lsf", "--directive='-R \"select[a100]\"'", """'-R "span[ptile=1]"' '-R "select[a100]"'""", ""),
    ],
)
def test_directives_of_the_user_replace_those_of_the_same_meaning(
    system: str, words: str, there: str, gone: str
) -> None:
    found = directives(asked(system, *shlex.split(words)), batch_system(system).prefix)
    assert set(shlex.split(there)) <= set(found)
    assert not [line for line in found if gone and line.startswith(tuple(shlex.split(gone)))]


def test_shared_nodes_are_not_requested_whole_and_gpus_only_if_there_are_some() -> None:
    for system, whole in (("slurm", "--exclusive"), ("pbs", "excl"), ("lsf", "-x"), ("flux", "--exclusive")):
        prefix = batch_system(system).prefix
        lines = directives(asked(system, "--shared", "--cpus-per-node", "16"), prefix)
        assert not any(line.endswith(whole) for line in lines)
        assert any(line.endswith(whole) for line in directives(asked(system), prefix))
        without = command(system, *SHAPE, "--gpus-per-node", "0", "--", "my.py")
        assert "gpu" not in "".join(directives(without, prefix)).replace("dask-gpu-mpi", "")
        assert "export DGM_EXPECT_GPUS" not in without
    # which memory there is by default is the site's to say
    assert "--mem" not in asked("slurm", "--shared", "--cpus-per-node", "16")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "--nodes", "9" * 18], "expected at most 100000 in the whole job"),
        (["slurm", "--gpus-per-node", "100000"], "--nodes 2 --gpus-per-node 100000: too many"),
        (
            ["slurm", "--time", "00:00:00"],
            "--time: invalid value '00:00:00' (expected a walltime of Slurm above zero, such as 01:30:00; also ",
        ),
        (["pbs", "--time", "1-12"], "expected a walltime of PBS above zero, such as 01:30:00; also "),
        (["slurm", "--account", "a\n#SBATCH --wrap=x"], "--account: "),
        (["pbs", "--queue", "$(id)"], "--queue: invalid value '$(id)'"),
        (["slurm", "--directive", "--a\n--b"], "--directive: "),
        (
            ["slurm", "--launcher", "pals"],
            "not available under Slurm (expected one of srun, mpirun, mpiexec)",
        ),
        (["slurm", "--output", "job.sbatch"], "Fix: --save job.sbatch writes the job script there"),
        (["slurm", "--output", "a b"], "--output: invalid value 'a b'"),
        (["slurm", "--mem", "64"], "--memory-per-node: invalid value '64' (expected a size such as 64G"),
        (
            ["slurm", "--gpus-per-node", "a100"],
            "--gpus-per-node: invalid value 'a100' (expected a number, or TYPE:NUMBER",
        ),
        (["pbs", "--gpus-per-node", "a100:4"], "--gpus-per-node a100:4: PBS has no type there"),
        (
            ["slurm", "--directive=--gres=gpu:a100:2"],
            "--directive --gres=gpu:a100:2: requests 2 GPUs (expected 4, by --nodes 2 --gpus-per-node 4). Fix: ",
        ),
        (["slurm", "--directive=--gpus=4"], "--directive --gpus=4: requests 4 GPUs (expected 8"),
        (["slurm", "--directive=--gres=gpu"], "--directive --gres=gpu: requests 1 GPU (expected 4"),
        (["slurm", "--shared"], "--shared: the cores of the job are missing. Fix: add --cpus-per-node"),
        (
            ["slurm", "--shared", "--cpus-per-node", "5", "--ranks-per-node", "2"],
            "--cpus-per-node 5: Slurm gives all ranks the same number (expected a multiple of 2",
        ),
        (["flux", "--mem", "64G"], "--memory-per-node: Flux allocates no memory"),
        (
            ["lsf", "--qos", "x"],
            "--qos: LSF has no such option (expected one of account, queue, mail_user, output)",
        ),
        (
            ["slurm", "--setup", "gone.sh"],
            "--setup 'gone.sh' does not exist (expected a file that the job can source)",
        ),
        (
            ["moab"],
            "unknown batch system 'moab' (expected one of slurm, pbs, lsf, flux). Fix: name it before all options",
        ),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    told = command(words[0], *SHAPE, *words[1:], "--", "my.py", rc=2)
    assert message in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-- gone.py", "script 'gone.py' does not exist"),
        ("-- -m gone", "no module named 'gone'"),
        ("-- -n 2 my.py", "--ranks of launch: the job script has it"),
        ("-- --layuot shared my.py", "'--layuot'"),
        ("-- --nthreads 0 my.py", "--nthreads"),
    ],
)
def test_a_command_line_that_is_wrong_is_refused_before_the_queue(words: str, message: str) -> None:
    assert message in command("slurm", *SHAPE, "--submit", *words.split(), rc=2)


def test_gpus_without_a_worker_are_counted() -> None:
    # three ranks on each host: both roles are on the first one, whose third rank has its GPUs
    made = command("slurm", *SHAPE, "--ranks-per-node", "3", "--", "--layout", "exclusive", "my.py")
    assert "--ntasks-per-node=3" in made
    words = "jobscript slurm --nodes 1 --gpus-per-node 2 --ranks-per-node 3 --time 1:00:00 -- my.py"
    assert "more ranks than GPUs: rank 2" in CliRunner().invoke(cli, words.split()).stderr


def is_a_file_name(text: str) -> bool:
    return 0 < len(os.fsencode(text)) < 80 and text not in (".", "..")


#: Everything that an argument can be: text of any kind, and bytes that are none.
WORDS = st.one_of(
    st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20),
    st.text("'\"\\$`(){}[]<>|&;*?~!#=- \t\r\n", max_size=12),
    st.binary(max_size=8).filter(lambda raw: b"\0" not in raw).map(os.fsdecode),
    st.just(HOSTILE),
)
FILE_NAMES = WORDS.map(lambda text: text.replace("/", "|")).filter(is_a_file_name)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(LAUNCHERS),
    # the first word is the script: options before it are the job's, and `launch` reads them
    st.lists(WORDS, min_size=1, max_size=4).filter(lambda words: not words[0].startswith("-")),
    st.lists(WORDS, max_size=2),
    FILE_NAMES,
    FILE_NAMES,
)
@pytest.mark.slow
def test_hostile_values_arrive_unchanged(
    pair: tuple[str, str], program: list[str], modules: list[str], setup: str, container: str
) -> None:
    """At `launch`; that it passes them on: the test below."""
    system, launcher = pair
    with tempfile.TemporaryDirectory() as folder:
        batch = FakeBatch(Path(folder))
        batch.mock_launch()
        (batch.directory / "setup").mkdir()
        (batch.directory / "setup" / setup).write_text("export SETUP_RAN=yes\n")
        (batch.directory / container).touch()
        job = JobRequest(
            system=system,
            launcher=launcher,
            program=("--container", container, *program),
            nodes=2,
            gpus_per_node=4,
            seconds=60,
            modules=tuple(modules),
            setup=f"setup/{setup}",
        )
        script = batch.directory / "job"
        script.write_bytes(os.fsencode(render(job)))
        before = set(batch.directory.iterdir())
        ran = batch.run(script, (), ENVIRON[system])
        assert ran.rc == 0, ran.output
        (words,) = ran.of("dask-gpu-mpi")
        assert words[-2 - len(program) :] == ["--container", container, *program]
        assert ran.of("module") == ([["load", *modules]] if modules else [])
        assert ran.rows[-1]["env"]["SETUP_RAN"] == "yes"
        assert {path.name for path in set(batch.directory.iterdir()) - before} == {"record"}
        # nothing that a batch system takes for a directive of its own
        prefix = batch_system(system).prefix
        assert render(job).count(f"\n{prefix}") == len(directives(render(job), prefix))
        assert "\r" not in render(job)  # sbatch refuses scripts with line breaks of DOS


def test_hostile_values_through_the_command_line(batch: FakeBatch, here: Path) -> None:
    setup, out = batch.directory / "a '$(touch gone)' file", batch.directory / "job"
    setup.write_text("true\n")
    words = [*SHAPE, "--setup", str(setup), "--save", str(out)]
    program = ["--container", HOSTILE, "my.py", HOSTILE, ""]
    code = "from dask_gpu_mpi.cli.main import main; main()"
    done = run_python(code, "jobscript", "slurm", *words, "--", *program, cwd=here)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    ran = batch.run(out, (), ENVIRON["slurm"])
    assert ran.program() == ["my.py", HOSTILE, ""]
    assert HOSTILE in ran.of("apptainer")[-1]
    assert not (batch.directory / "gone").exists()


@pytest.mark.usefixtures("dask_config")
def test_a_site_can_ship_its_defaults() -> None:
    shape = {"nodes": 1, "gpus-per-node": 8, "time": "01:30:00"}
    lists = {"modules": ["cuda", "openmpi"], "directives": ["--constraint=gpu"]}
    site = {**shape, **lists, "account": "0123", "launcher": "mpirun"}
    dask.config.config["gpu-mpi"] = {"jobscript": site}
    resolve({}, source="keyword")  # its section is no option of a cluster
    made = command("slurm", "--nodes", "3", "--module", "my module", "--directive", "--qos=q", "--", "my.py")
    expected = "--nodes=3 --gpus-per-node=8 --time=01:30:00 --account=0123 --constraint=gpu --qos=q"
    assert {*expected.split()} <= {*directives(made, "#SBATCH ")}
    assert "\nmodule load 'my module' || exit 2\n" in made
    assert "\nexport DGM_LAUNCHER=mpirun\n" in made
    # the command line's other name for a queue
    dask.config.config["gpu-mpi"] = {"jobscript": {"partition": "x"}}
    said = "configuration gpu-mpi.jobscript.partition: unknown option"
    assert said in command("slurm", "--", "my.py", rc=2)


def test_configuration_from_the_environment(here: Path) -> None:
    """As text: an account may be a number that begins with zeros."""
    code = "import dask_gpu_mpi; print(dask_gpu_mpi.job_script('slurm', 'my.py', nodes=1, time='1:00:00'))"
    of_site = {"ACCOUNT": "007", "QOS": "1_2", "GPUS_PER_NODE": "4"}
    env = {f"DASK_GPU_MPI__JOBSCRIPT__{name}": value for name, value in of_site.items()}
    done = run_python(code, cwd=here, env={**os.environ, **env})
    assert {"--account=007", "--qos=1_2", "--gpus-per-node=4"} <= {*directives(done.stdout, "#SBATCH ")}, (
        done.stderr
    )


@pytest.mark.parametrize(
    ("system", "name", "answer", "number"),
    [
        ("slurm", "sbatch", "4711;cluster\n", "4711"),
        ("pbs", "qsub", "4711.server\n", "4711.server"),
        ("lsf", "bsub", "Job <4711> is submitted to queue <gpu>.\n", "4711"),
        ("flux", "flux", "f2Xyz\n", "f2Xyz"),
        ("flux", "flux", "ƒ2Xyz\n", "ƒ2Xyz"),
        ("pbs", "qsub", "your project has 5.5 hours left\n4711[].server\n", "4711[].server"),
    ],
)
def test_submit(
    batch: FakeBatch, monkeypatch: pytest.MonkeyPatch, system: str, name: str, answer: str, number: str
) -> None:
    batch.answers[name] = (answer, 0)
    for key, value in batch.environ().items():
        monkeypatch.setenv(key, value)
    # files of an image are not looked for
    program = ("--container", "im.sif", "/opt/my.py", "a b")
    assert asked(system, "--submit", program=program) == f"{number}\n"
    (row,) = [row for row in batch.rows() if row["name"] == name]
    assert "\nprogram=(--container im.sif /opt/my.py 'a b')\n" in row["stdin"]
    refused = (system, *SHAPE, "--submit", "--", "my.py")
    for text, code in (("error: invalid account", 1), ("come back later", 0)):
        batch.answers[name] = (f"{text}\n", code)
        monkeypatch.setenv("FAKE_ANSWERS", batch.environ()["FAKE_ANSWERS"])
        assert f"exited with code {code}: {text}" in command(*refused, rc=2)
    monkeypatch.setenv("PATH", "/nowhere")
    assert f"{name}: not found in PATH" in command(*refused, rc=2)
