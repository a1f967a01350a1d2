"""What Slurm told of a cluster: recorded answers, one folder for each version, as a site or as stand-in commands.

Recorded for the user daemon on a Slurm of four nodes, n1 to n4:
gpu (default)   n1-n3; MaxTime=2:00:00, MaxNodes=2
long            n1-n4; MaxTime=7-0, MaxCPUsPerNode=12, MaxMemPerNode=200000; QOS capped: MaxWall=1-0, cpu=20, mem=100G
lab             n4; hidden, for the group daemon and the account teaching, not for QOS high; MinNodes=2
old             n4; State=DRAIN
n1 n2 have 4 a100 each, n3 has 2 h100, n4 none; n1 also 2 nvme; n2 is drained.  SelectTypeParameters=CR_CORE_MEMORY.
daemon may charge research, the default, in partition long only (QOS normal, MaxWall=30, node=3, MaxJobs=4), and
teaching (QOS normal, high); QOS tiny: MaxWall=10, node=2, cpu=30 in all; forbidden is nobody's, as is account outside.
On 24.11.5 there is no accounting, and so long has no QOS, and both reservations are root's.
"""

import shlex
from pathlib import Path

from cluster.site import SACCTMGR, SCONTROL, Site, make_site
from tests.executables import put_executable

HERE = Path(__file__).parent
VERSIONS = ("22.05.8", "24.11.5")


def answers(version: str = VERSIONS[0]) -> dict[str, str]:
    """Text of each answer, by the names of site.SCONTROL and site.SACCTMGR."""
    return {path.stem: path.read_text() for path in (HERE / f"slurm-{version}").glob("*.txt")}


def recorded_site(version: str = VERSIONS[0]) -> Site:
    """The site as daemon sees it, its groups apart, which are this process's."""
    return make_site(answers(version), {}, user="daemon", uid=1)


def put_site(
    folder: Path, version: str = VERSIONS[0], *, is_calm: bool = False, node_address: str = "127.0.0.1"
) -> None:
    """Put scontrol and sacctmgr that give the recorded answers; needs no other command on PATH.

    is_calm: without accounting, and with all nodes up.  node_address: of all nodes.
    """
    told = answers(version)
    told["nodes"] = told["nodes"].replace("NodeAddr=127.0.0.1", f"NodeAddr={node_address}")
    if is_calm:
        told["config"] = told["config"].replace("accounting_storage/slurmdbd", "accounting_storage/none")
        told["nodes"] = told["nodes"].replace("IDLE+DRAIN", "IDLE")
    for command, questions in (("scontrol", SCONTROL), ("sacctmgr", SACCTMGR)):
        cases = [f"*{shlex.quote(' '.join(argv[-2:]))}) printf %s {shlex.quote(told[name])};;"
                 for name, argv in questions.items()]  # fmt: skip
        put_executable(folder, command, "\n".join(['case "$*" in', *cases, "*) exit 1;;", "esac"]))
