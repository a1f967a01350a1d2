"""Clusters: this machine, or a job -> [clusters] -> the name of its cluster.  Standard library only.

Several clusters may share home folders and storage, and each counts its jobs from 1.
Sources: slurm.conf(5), ClusterName; sbatch(1), SLURM_CLUSTER_NAME and SLURM_CLUSTERS.
"""

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path

from cluster import slurm

ANSWER_S = 5.0  # for a slurmctld that is asked for the name

# Where Slurm's clients look for their configuration, the last where slurmctld hands it out; slurm.conf(5).
SLURM_CONFS = ("/etc/slurm/slurm.conf", "/run/slurm/conf/slurm.conf")
IN_FILE = re.compile(r"^\s*ClusterName\s*=\s*[\"']?([^\s\"'#]+)", re.IGNORECASE | re.MULTILINE)


def cluster_name(environ: Mapping[str, str], timeout_s: float = ANSWER_S) -> str:
    """The cluster that Slurm's commands ask here, in lower case as Slurm has it; empty where nobody says it.

    That is the user's choice of a cluster, or the job's that this process is in, or the configuration's.  slurmctld is
    asked only where no file of a known place names it.
    """
    chosen = environ.get("SLURM_CLUSTERS", "")
    if chosen:
        return "" if chosen == "all" or "," in chosen else chosen.lower()
    if environ.get("SLURM_CLUSTER_NAME"):
        return environ["SLURM_CLUSTER_NAME"].lower()
    for path in [environ["SLURM_CONF"]] if environ.get("SLURM_CONF") else SLURM_CONFS:
        with contextlib.suppress(OSError):
            if match := IN_FILE.search(Path(path).read_text(errors="replace")):
                return match[1].lower()
    return by_controller(environ, timeout_s)


def by_controller(environ: Mapping[str, str], timeout_s: float) -> str:
    """ClusterName as slurmctld says it; empty when there is none, or no answer."""
    try:
        shown = slurm.run(["scontrol", "show", "config"], environ, timeout_s=timeout_s)
    except slurm.SlurmError:
        return ""
    match = IN_FILE.search(shown)
    return match[1].lower() if match else ""
