"""Container runtimes: a class for each, with the command line that runs a rank in an image.

In each of them a rank needs the folders of the job and the node's ``/tmp`` under their own names, the GPUs, the network and the
processes of its node, and the variables of MPI, of Dask and of this package.

`launch` chooses the image's runtime first (`choose_container`). `dask_gpu_mpi.sites.command` then adds the folders of the job
(`Container.at`), and what the launcher's ranks need (`rank_variables`), and asks the runtime for its words in the command line.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dask_gpu_mpi.errors import InputError, LauncherError
from dask_gpu_mpi.sites.batch import SYSTEMS, Ask
from dask_gpu_mpi.sites.launchers import Launcher, in_batch_script

#: Endings of image files, by which a file that does not exist is recognised.
_FILES = (".sif", ".sqsh", ".squashfs", ".img", ".toml")
#: Separators in the mounts of the runtimes, which a path must not contain.
_SEPARATORS = ",:;"
#: Variables for a rank, in addition to those of its launcher and batch system.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "DASK_*", "DGM_*", "NCCL_*", "OMP_NUM_THREADS", "RAPIDS_*", "UCX_*")


@dataclass(frozen=True)
class Container:
    """An image, and how the ranks run in it."""

    runtime: Runtime
    #: The image in the form that the runtime requires.
    image: str
    #: ``SOURCE:TARGET`` or ``SOURCE:TARGET:OPTIONS``, the user's first.
    mounts: tuple[str, ...] = ()
    #: The working directory of the ranks.
    cwd: str = ""
    #: The variables of a rank, with ``*`` at the end of a prefix, for runtimes that pass none by themselves.
    variables: tuple[str, ...] = ()
    #: How launcher and MPI library find each other (``srun --mpi``).
    mpi: str = ""

    def at(self, cwd: str, folders: Iterable[str]) -> Container:
        """The container with a working directory, in which these folders of the job are mounted under their own names."""
        if not self.runtime.mounts_folders:
            return replace(self, cwd=cwd)
        # under the names that the user has for them, which may be symbolic links
        paths = sorted(
            {*self.runtime.folders, *(os.path.abspath(os.path.join(cwd, path)) for path in folders)}
        )
        if odd := [path for path in paths if set(path) & set(_SEPARATORS)]:
            raise LauncherError(
                f"launch: --container: {self.runtime.name} can't mount {odd[0]!r}",
                expected="a path without ',', ':' and ';'",
                fix="another directory",
            )
        taken = {mount.split(":")[1] for mount in self.mounts}
        ours = tuple(f"{path}:{path}" for path in paths if path not in taken)
        return replace(self, mounts=self.mounts + ours, cwd=cwd)


class Runtime:
    """The differences between container runtimes. A subclass overrides the attributes and methods that apply to it."""

    #: Its name for ``--container-runtime``, and its command.
    name = ""
    #: Endings of the image files that it opens; an empty one: any file or folder.
    files: tuple[str, ...] = ()
    #: The protocols of images, before ``://``. An image without one is Docker's. Empty: any.
    protocols: tuple[str, ...] = ("docker",)
    #: Whether it can mount a folder for which the image has none.
    mounts_folders = True
    #: Folders of the node that each rank needs and that it does not mount by itself.
    folders: tuple[str, ...] = ("/tmp",)
    #: The launcher that starts its containers; empty: any.
    launcher = ""
    #: Whether a rank has all variables and open files of the process that starts its container, so that it needs no launcher.
    inherits = False

    def missing(self, path: str, launcher: str, ask: Ask) -> str:
        """The reason why it can't be used here; empty: it can. `launcher` is the user's choice, or the batch system's."""
        return "" if shutil.which(self.name, path=path) else f"command {self.name} not found in PATH"

    def runs(self, image: str) -> bool:
        """Whether it runs images of this kind."""
        if image.startswith("-") or image.endswith(".toml"):  # for `SrunOptions`
            return False
        if _is_file(image):
            return image.endswith(self.files)
        protocol, separator, _ = image.partition("://")
        return not separator or not self.protocols or protocol in self.protocols

    def spelled(self, image: str) -> str:
        """The image in the form of its command line."""
        return image

    def environment(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        """The variables to set before the launcher starts."""
        return {}

    def launcher_options(self, container: Container) -> list[str]:
        """Options of the launcher, if that starts the containers."""
        return []

    def command(self, container: Container, environ: Mapping[str, str]) -> list[str]:
        """The words before the command of a rank."""
        return []

    def alone(self, container: Container, environ: Mapping[str, str]) -> list[str]:
        """The words before a command that is not a rank, and runs once."""
        return self.command(container, environ)


class Pyxis(Runtime):
    """Pyxis, a plugin of Slurm, with Enroot: srun itself starts the containers (github.com/NVIDIA/pyxis/wiki/Usage).

    It passes all variables. By default, Enroot's ``/tmp`` is in memory, and it mounts GPUs only if these variables are set
    (github.com/NVIDIA/enroot, conf/mounts/10-system.fstab and conf/hooks/98-nvidia.sh).
    """

    name = "pyxis"
    files = (".sqsh", ".squashfs")
    protocols = ("docker", "dockerd", "podman")
    launcher = "srun"

    def missing(self, path: str, launcher: str, ask: Ask) -> str:
        if launcher != self.launcher:
            return "the ranks are not started by srun"
        has_option = "--container-image" in ask(["srun", "--help"])
        return "" if has_option else "srun has no option --container-image"

    def spelled(self, image: str) -> str:
        # without a slash it would be a name in a registry
        return os.path.abspath(image) if _is_file(image) else image

    def environment(self, environ: Mapping[str, str]) -> dict[str, str | None]:
        wanted = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        return {name: value for name, value in wanted.items() if name not in environ}

    def launcher_options(self, container: Container) -> list[str]:
        # mounts are separated by commas, and the options of a mount by "+"
        mounts = ",".join(mount.replace(",", "+") for mount in container.mounts)
        return [
            f"--container-image={container.image}",
            f"--container-mounts={mounts}",
            f"--container-workdir={container.cwd}",
        ]

    def alone(self, container: Container, environ: Mapping[str, str]) -> list[str]:
        overlap = [] if in_batch_script(environ) else ["--overlap"]  # the shell may be a step
        start = ["srun", "--nodes=1", "--ntasks=1", "--mpi=none", *overlap, *self.launcher_options(container)]
        return [*start, *self.command(container, environ)]


class PodmanHpc(Runtime):
    """podman-hpc of NERSC (github.com/NERSC/podman-hpc): it passes no variables, and by default shares nothing with the node.

    CUDA moves data between the containers of a node only if they share its PIDs and its shared memory.
    """

    name = "podman-hpc"

    def spelled(self, image: str) -> str:
        return image.removeprefix("docker://")

    def command(self, container: Container, environ: Mapping[str, str]) -> list[str]:
        # its other modules for MPI (etc/modules.d) replace the library of the image
        modules = ["--gpu", *(["--openmpi-pmix"] if container.mpi.startswith("pmix") else [])]
        return [
            *("podman-hpc", "run", "--rm", "--interactive", "--entrypoint=", *modules),
            *("--network=host", "--pid=host", "--ipc=host", f"--workdir={container.cwd}"),
            *(f"--volume={mount}" for mount in container.mounts),
            *(f"--env={name}" for name in container.variables),
            "--",  # without it, podman-hpc would read --help or --gpu of the script as its own
            container.image,
        ]


class Shifter(Runtime):
    """Shifter of NERSC (github.com/NERSC/shifter, doc/command/shifter.rst and `shifter --help`).

    It passes all variables, and mounts ``/tmp`` and the file systems of the site. It can mount a folder only on one of the
    image. So the folders of the job must be on a file system of the site.
    """

    name = "shifter"
    mounts_folders = False

    def spelled(self, image: str) -> str:
        return image.replace("docker://", "docker:", 1)

    def command(self, container: Container, environ: Mapping[str, str]) -> list[str]:
        # the site's module for GPUs; the option would win over these variables
        chosen = environ.get("SHIFTER_MODULE") or environ.get("SLURM_SPANK_SHIFTER_MODULE")
        modules = [] if chosen else ["--module=gpu"]
        volumes = [f"--volume={mount}" for mount in container.mounts]
        return ["shifter", f"--image={container.image}", *modules, *volumes, "--"]


class Apptainer(Runtime):
    """Apptainer (apptainer.org/docs/user, "Bind Paths and Mounts"): it passes all variables, and mounts ``/tmp`` by itself."""

    name = "apptainer"
    files = ("",)
    protocols = ()
    folders = ()
    inherits = True

    def spelled(self, image: str) -> str:
        return image if _is_file(image) or "://" in image else f"docker://{image}"

    def command(self, container: Container, environ: Mapping[str, str]) -> list[str]:
        mounts = (f"--bind={mount}" for mount in container.mounts)
        return [self.name, "exec", "--nv", *mounts, container.image]


class Singularity(Apptainer):
    """SingularityCE, and Apptainer before it had that name."""

    name = "singularity"


class SrunOptions(Pyxis):
    """Options of srun that choose an image, such as ``--environment=x.toml`` of CSCS (docs.cscs.ch, "Container Engine").

    They, or their file, have the mounts as well. The working directory must be among these.
    """

    name = "srun"
    mounts_folders = False

    def missing(self, path: str, launcher: str, ask: Ask) -> str:
        return "" if launcher == self.launcher else "the ranks are not started by srun"

    def runs(self, image: str) -> bool:
        return image.startswith("-") or image.endswith(".toml")

    def spelled(self, image: str) -> str:
        return image if image.startswith("-") else shlex.quote(f"--environment={os.path.abspath(image)}")

    def launcher_options(self, container: Container) -> list[str]:
        if container.mounts:
            raise LauncherError(
                "launch: --container-mount: can't be combined with options of srun that choose the image",
                fix="mount it in the file of the image, or by an option",
            )
        try:
            return shlex.split(container.image)
        except ValueError as error:
            raise InputError(
                f"launch: --container {container.image}: {error}", fix="close the quotation"
            ) from None

    def command(self, container: Container, environ: Mapping[str, str]) -> list[str]:
        return ["env", f"--chdir={container.cwd}"]


#: In the order of choice, for images that several can run. Pyxis is part of the site's batch system. podman-hpc comes before
#: Shifter: NERSC has both, and Shifter's images must be pulled before the job. Apptainer comes last, since it converts images of
#: a registry on each node.
RUNTIMES: tuple[Runtime, ...] = (SrunOptions(), Pyxis(), PodmanHpc(), Shifter(), Apptainer(), Singularity())


def choose_container(
    image: str,
    *,
    runtime: str = "",
    mounts: Sequence[str] = (),
    launcher: str,
    environ: Mapping[str, str],
    ask: Ask,
) -> Container:
    """The container of an image in the chosen runtime, or in the first one on this node that runs the image.

    InputError if the image, the runtime or a mount can't be used, or if there is no such runtime on this node.
    """
    names = [each.name for each in RUNTIMES]
    if runtime and runtime not in names:
        raise InputError(
            f"launch: --container-runtime {runtime}: unknown", expected=f"one of {', '.join(names)}"
        )
    if not image.startswith("-") and _is_file(image) and not os.path.exists(image):
        raise InputError(
            f"launch: --container {image}: no such file",
            expected="an image file, or the name of an image in a registry",
            fix="its path from the working directory",
        )
    fitting = [each for each in RUNTIMES if (each.name == runtime if runtime else each.runs(image))]
    path = environ.get("PATH", os.defpath)
    chosen = next((each for each in fitting if not each.missing(path, launcher, ask)), None)
    if chosen is None and runtime:
        why = fitting[0].missing(path, launcher, ask)
        raise LauncherError(
            f"launch: --container-runtime {runtime}: {why}", fix="load its module, or choose another"
        )
    if chosen is None:
        raise LauncherError(
            f"launch: --container {image}: no container runtime found",
            expected=f"one of {', '.join(each.name for each in fitting)}",
            fix="load its module",
        )
    if not chosen.runs(image):
        kinds = "".join(f"a file {ending}, " for ending in chosen.files)
        raise InputError(
            f"launch: --container {image}: {runtime} does not run such images",
            expected=f"{kinds}the name of an image in a registry",
            fix="another --container-runtime",
        )
    return Container(chosen, chosen.spelled(image), tuple(map(_mount, mounts)))


def rank_variables(launcher: Launcher, system: str) -> tuple[str, ...]:
    """The variables that a rank needs in its container, with ``*`` at the end of a prefix."""
    of_launcher = {f"{name.partition('_')[0]}_*" for name in launcher.scrubbed.split()}
    of_system = {f"{prefix}*" for prefix in SYSTEMS.get(system, ())}
    return tuple(sorted({*_VARIABLES, *of_launcher, *of_system}))


def _is_file(image: str) -> bool:
    """Whether this is a path, not the name of an image in a registry."""
    return os.path.exists(image) or image.startswith(("/", ".", "~")) or image.endswith(_FILES)


def _mount(text: str) -> str:
    """A mount of the user with absolute source and target."""
    source, _, rest = text.partition(":")
    path = os.path.abspath(os.path.expanduser(source))
    target, _, options = rest.partition(":")
    target = target or path
    if not source or not os.path.isabs(target) or set(path + target) & set(_SEPARATORS) or ":" in options:
        raise InputError(
            f"launch: --container-mount {text}: can't be mounted",
            expected="SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro, with an absolute TARGET without ',' and ';'",
        )
    if not os.path.exists(path):
        raise InputError(
            f"launch: --container-mount {text}: {path} does not exist",
            expected="a file or folder of each node",
        )
    return ":".join([path, target, *([options] if options else [])])
