"""Causes: a verdict's class -> [causes] -> what it means, and what the run's owner can do.  Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

RESUME = "python -m cluster.submit --resume RUN_DIR"


@dataclass(frozen=True, slots=True)
class Advice:
    """One class of ends; RUN_DIR stands for the run folder."""

    text: str
    to_do: str


ADVICE: Mapping[str, Advice] = {
    "finished": Advice("all steps are done", "nothing"),
    "stopped": Advice("its user had it saved and ended", RESUME),
    "user cancel": Advice("somebody cancelled the job", f"{RESUME}, if it was saved and is to go on"),
    "usage": Advice("the spec or the environment is wrong", "correct it and submit anew"),
    "preempted": Advice("a job of higher priority took its nodes", f"wait; if no job of the run is queued: {RESUME}"),
    "time limit": Advice("its time limit was reached", f"wait; if no job of the run is queued: {RESUME}"),
    "node failure": Advice("a node died", f"wait for Slurm to requeue it; else {RESUME}"),
    "requeued": Advice("somebody requeued the job", "wait"),
    "bad node": Advice("a node failed too often and is left out", "tell the administrators"),
    "launch": Advice(
        "Slurm could not start the ranks on their nodes", f"wait; if no job of the run is queued: {RESUME}"
    ),
    "unfit node": Advice(
        "a node lacks what the run had on others", f"tell the administrators; if no job of the run is queued: {RESUME}"
    ),
    "srun killed": Advice(
        "somebody, or the lack of memory, killed srun", f"look at the first node (dmesg); then {RESUME}"
    ),
    "lost": Advice("its supervisor died, with its node or by kill -9", RESUME),
    "killed": Advice(
        "a rank was killed from outside", f"look at the node for lack of memory (dmesg) or a user's kill; then {RESUME}"
    ),
    "hang": Advice("nothing moved for longer than it may", f"read the stacks; then {RESUME}"),
    "connection": Advice("a rank lost the others", f"look at the network between the nodes; then {RESUME}"),
    "port": Advice("the ranks found no free port to meet at", RESUME),
    "out of memory": Advice(
        "a rank had too little memory",
        f"a smaller train.micro_batch_size (GPU), a larger memory_per_node (host); then {RESUME}",
    ),
    "exception": Advice(
        "an error of the program", f"correct it; then {RESUME} code=live, since a run keeps its code; or submit it anew"
    ),
    "nan": Advice("the loss is no number any more", f"a smaller train.lr or a longer warm-up; then {RESUME}"),
    "disk": Advice("the storage refused", f"free space or quota below run_root; then {RESUME}"),
    "unknown": Advice("the ranks left no word", f"read the log; then {RESUME}"),
}


# Slurm's word for the end of a job that left no verdict -> the class that it would have had.
BY_SLURM: Mapping[str, str] = {
    "CANCELLED": "user cancel",
    "NODE_FAIL": "node failure",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "preempted",
    "TIMEOUT": "time limit",
}


def advise(cause: str) -> Advice:
    """What a class means; one that this release does not know means to read the log."""
    return ADVICE.get(cause, ADVICE["unknown"])
