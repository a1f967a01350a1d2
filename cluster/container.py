"""Container: a spec's container section -> [container] -> how srun or the rank's command line enters the image.  Pure.

The supervisor stays outside, so an image needs neither Slurm nor munge; what ranks read and write is mounted where it
is.  Not run here: the text is checked, the programs are not installed.
Sources: pyxis, "Usage" and srun --help; apptainer-exec(1), "Environment and Metadata".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cluster import rank

if TYPE_CHECKING:
    from cluster.spec import JobSpec

OWN_VARIABLES = (
    rank.MASTER_ADDR_VARIABLE,
    rank.MASTER_PORTS_VARIABLE,
    rank.TOKEN_VARIABLE,
    rank.ATTEMPT_VARIABLE,
    rank.SPEC_VARIABLE,
    rank.KILL_WAIT_VARIABLE,
    "OMP_NUM_THREADS",
    "PYTHONDONTWRITEBYTECODE",
)
HOSTS_OWN = ("PYTHONPATH", "PYTHONHOME")  # of the interpreter outside


@dataclass(frozen=True, slots=True)
class Entrance:
    """How ranks get into an image; without one everything is empty."""

    srun: tuple[str, ...] = ()  # options of srun
    command: tuple[str, ...] = ()  # words before the interpreter
    variables: tuple[str, ...] = ()  # names whose values win over the image's
    prefix: str = ""  # NAME's value is also given as PREFIX + NAME


def entrance(spec: "JobSpec", run_dir: Path, code_root: Path) -> Entrance:
    """How the ranks of a spec get into its image.

    code_root: the folder that holds the packages.
    """
    image, runtime = spec.container.image, spec.container.runtime
    if image is None or runtime is None:
        return Entrance()
    mounts = all_mounts([run_dir, spec.dataset.root, code_root], spec.container.mounts)
    variables = (*OWN_VARIABLES, *spec.env)
    if runtime == "pyxis":
        options = (
            f"--container-image={image}",
            f"--container-mounts={','.join(mounts)}",
            f"--container-workdir={run_dir}",
            f"--container-env={','.join(variables)}",
        )
        return Entrance(srun=options, variables=variables)
    gpus = ("--nv",) if spec.num_gpus_per_node and spec.train.device != "cpu" else ()
    bind = (f"--bind={','.join(mounts)}", f"--pwd={run_dir}")
    return Entrance(
        command=(runtime, "exec", *gpus, *bind, image), variables=variables, prefix=f"{runtime.upper()}ENV_"
    )


def all_mounts(own: Sequence[Path], asked: Sequence[str]) -> list[str]:
    """Folders at their own paths, those inside another one left out, then the user's; SRC:DST or SRC:DST:ro."""
    outer = [path for path in own if not any(path.is_relative_to(other) for other in own if other != path)]
    folders = dict.fromkeys(outer)
    return [f"{path}:{path}" for path in folders] + [mount if ":" in mount else f"{mount}:{mount}" for mount in asked]


def variables_inside(environ: Mapping[str, str], names: Sequence[str], prefix: str) -> dict[str, str]:
    """The environment of what starts the ranks in an image.

    names: variables that win over the image's.  prefix: Entrance.prefix.
    """
    kept = {name: value for name, value in environ.items() if name not in HOSTS_OWN or name in names}
    kept["PYTHONDONTWRITEBYTECODE"] = "1"  # the image's Python must not leave its bytecode in the snapshot
    return kept | ({prefix + name: kept[name] for name in names if name in kept} if prefix else {})
