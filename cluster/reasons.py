"""Pending reasons: squeue's word -> [reasons] -> why a job waits, whether that ends, and what to do.  Pure.

Source: Slurm's documentation, "Job Reason Codes" (job_reason_codes.html), and slurm.h, enum job_state_reason; 22.05 to
25.11.  What Slurm or a site's plugin says in words of its own (state_desc) stands in the same place.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

ITSELF = "itself"  # the reason goes away without anybody doing anything
USER = "user"  # the job's owner has to act
ADMIN = "admin"  # an administrator has to act
NEVER = "never"  # it stays for as long as the job and the cluster are as they are


@dataclass(frozen=True, slots=True)
class Reason:
    """One pending reason in words."""

    text: str  # why the job waits
    ended_by: str  # ITSELF, USER, ADMIN or NEVER
    to_do: str = ""  # empty where waiting is enough

    @property
    def never_ends(self) -> bool:
        """Whether the job cannot start as it is."""
        return self.ended_by == NEVER


SMALLER = "ask for less, or for another partition (sinfo shows their limits)"
RELEASE = "scontrol release JOB_ID"
NAMES = "correct the key in the spec and submit anew (sacctmgr show associations user=$USER shows yours)"
SUPPORT = "ask the administrators of the cluster"

ENDED = "its last run has just ended like this; Slurm has not looked at it since"

REASONS: Mapping[str, Reason] = {
    "None": Reason("Slurm has not looked at it yet", ITSELF),
    "WaitingForScheduling": Reason("Slurm has not looked at it yet", ITSELF),
    "Priority": Reason("jobs of higher priority come first", ITSELF),
    "Resources": Reason("it is next, once enough nodes are free", ITSELF),
    "BeginTime": Reason("its begin time has not come (a requeued job waits two minutes)", ITSELF),
    "Dependency": Reason("another job has to end first", ITSELF),
    "DependencyNeverSatisfied": Reason(
        "the job it waits for has ended in another way than its dependency asks for", NEVER, "submit it anew"
    ),
    "PartitionTimeLimit": Reason("time_limit is above the partition's MaxTime", NEVER, SMALLER),
    "PartitionNodeLimit": Reason(
        "nodes is outside the partition's MinNodes and MaxNodes, or more than it has in service", NEVER, SMALLER
    ),
    "PartitionConfig": Reason("no node of the partition has as much as a node of this job needs", NEVER, SMALLER),
    "BadConstraints": Reason("no node can meet its constraints", NEVER, SMALLER),
    "QOSNotAllowed": Reason("the partition or the account does not take this QOS", NEVER, NAMES),
    "AccountNotAllowed": Reason("the partition does not take this account", NEVER, NAMES),
    "InvalidAccount": Reason("the account is not valid", NEVER, NAMES),
    "InvalidQOS": Reason("the QOS is not valid", NEVER, NAMES),
    "ReservationDeleted": Reason("its reservation was deleted", NEVER, "leave the reservation out"),
    "DeadLine": Reason("it can no longer end before its deadline", NEVER, "submit it anew"),
    "JobHeldUser": Reason("it is held by its owner", USER, RELEASE),
    "JobHeldAdmin": Reason("it is held by an administrator, or has failed to start", ADMIN, SUPPORT),
    "JobHoldMaxRequeue": Reason("it was requeued too often (slurm.conf's MaxBatchRequeue)", USER, RELEASE),
    "JobLaunchFailure": Reason("it could not be launched", USER, RELEASE),
    "ReqNodeNotAvail": Reason("a node that it needs is down, drained, reserved or busy", ITSELF, "see sinfo -R"),
    "NodeDown": Reason("a node that it needs is down", ITSELF, "see sinfo -R"),
    "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions": Reason(
        "nodes that it needs are down, drained or kept for jobs of higher partitions", ITSELF, "see sinfo -R"
    ),
    "PartitionDown": Reason("the partition is down", ADMIN, "use another partition, or wait"),
    "PartitionInactive": Reason("the partition is inactive", ADMIN, "use another partition, or wait"),
    "Reservation": Reason("its reservation has not begun or is in use", ITSELF),
    "Licenses": Reason("a license that it needs is in use", ITSELF),
    "JobArrayTaskLimit": Reason("as many members of its array run as may", ITSELF),
    "Cleaning": Reason("its last run is being cleaned up after", ITSELF),
    "Prolog": Reason("the prolog runs", ITSELF),
    "FrontEndDown": Reason("no front end is there to start it", ADMIN, SUPPORT),
    "FedJobLock": Reason("clusters of the federation agree on who runs it", ITSELF),
    "SchedDefer": Reason(
        "it was to start at once, and the cluster starts no job at once (defer)", NEVER, "leave --immediate out"
    ),
    "ReservationInvalid": Reason("its reservation is not valid", NEVER, "correct or leave out the key reservation"),
    "Constraints": Reason("no node that meets its constraints is free now", ITSELF),
    "AccountingPolicy": Reason(
        "a limit of accounting", ADMIN, "ask the administrators which (sacctmgr show qos, assoc)"
    ),
    "BurstBufferOperation": Reason(
        "its burst buffer has failed", USER, f"see scontrol show job JOB_ID; then {RELEASE}"
    ),
    "NonZeroExitCode": Reason(ENDED, ITSELF),
    "RaisedSignal": Reason(ENDED, ITSELF),
    "TimeLimit": Reason(ENDED, ITSELF),
    "InactiveLimit": Reason(ENDED, ITSELF),
    "OutOfMemory": Reason(ENDED, ITSELF),
    "SystemFailure": Reason("Slurm itself has failed", ADMIN, SUPPORT),
    "PowerNotAvail": Reason("there is not enough power", ITSELF),
    "PowerReserved": Reason("power is reserved for others", ITSELF),
    "MaxMemPerLimit": Reason("it asks for more memory than a job may have", NEVER, SMALLER),
    "MaxBBPerAccount": Reason("its account's burst buffer is used up", ITSELF),
}

# The limits of an association or a QOS have names of their own, more than a hundred of them; the first match counts.
FAMILIES = (
    (r"(Assoc|QOS)Grp.*RunMin", "a limit on the minutes of the jobs that run", ITSELF),
    (r"(Assoc|QOS)?Max.*(PerJob|PerNode)|QOSMin|(Assoc|QOS).*(WallDuration|TimeLimit)", "a limit for one job", NEVER),
    (r"(Assoc|QOS)(Grp|Max).*Minutes|QOSUsageThreshold", "a budget that is used up", ADMIN),
    (r"(Assoc|QOS)(Grp|Max)|Max.*PerAccount|(Association|QOS)(Job|Resource)Limit", "a limit that jobs share", ITSELF),
)
FAMILY_TO_DO = {
    NEVER: "ask for less, or use another QOS or account (sacctmgr show qos)",
    ADMIN: "use another account or QOS, or ask for a larger budget",
    ITSELF: "it starts when others under the limit have ended; should it alone be above it, ask for less",
}


def explain(reason: str) -> Reason:
    """What a pending reason means.

    reason: as squeue prints it; more may follow the word, such as `ReqNodeNotAvail, UnavailableNodes:n1`.
    """
    text = reason.strip("()") or "None"
    if re.search(r"\bheld\b", text):  # `launch failed requeued held`, `job requeued in held state`
        return Reason(f"Slurm holds it until it is released ({text.replace('_', ' ')})", USER, RELEASE)
    found = REASONS.get(text) or REASONS.get(re.split(r"[,\s(]", text)[0])
    if found is not None:
        return found
    for pattern, what, ended_by in FAMILIES:
        if re.match(pattern, text):
            whose = "the QOS" if text.startswith("QOS") else "the account or user"
            return Reason(f"{what}, of {whose}", ended_by, FAMILY_TO_DO[ended_by])
    if text.startswith("BurstBuffer"):
        return Reason("its burst buffer is not ready", ITSELF)
    return Reason("a reason that this release does not know: see squeue(1)", ITSELF)
