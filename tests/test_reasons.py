"""Pending reasons: every word of Slurm's has a text, and those that never resolve are told from those that do."""

import pytest

from cluster.reasons import ADMIN, ITSELF, NEVER, USER, explain

UNKNOWN = explain("NoSuchReason")

# Slurm's documentation, "Job Reason Codes", release 25.11, with the words of older releases; all of them.
RESOURCES = ["BB", "Billing", "Energy", "GRES", "License", "Memory", "Mem", "Node", "Unknown", "CPU", "Cpu"]
LIMITS = (
    "AssocGrp{} AssocGrp{}Minutes AssocGrp{}RunMinutes AssocMax{}MinutesPerJob AssocMax{}PerJob AssocMax{}PerNode "
    "Max{}PerAccount QOSGrp{} QOSGrp{}Minutes QOSGrp{}RunMinutes QOSMax{}MinutesPerJob QOSMax{}PerJob QOSMax{}PerNode "
    "QOSMax{}PerUser QOSMin{}"
)
KNOWN = f"""
AccountingPolicy AccountNotAllowed AssociationJobLimit AssociationResourceLimit AssociationTimeLimit BadConstraints
BeginTime BurstBufferOperation BurstBufferResources BurstBufferStageIn Cleaning Constraints DeadLine Dependency
DependencyNeverSatisfied FedJobLock FrontEndDown InactiveLimit InvalidAccount InvalidQOS JobArrayTaskLimit JobHeldAdmin
JobHeldUser JobHoldMaxRequeue JobLaunchFailure Licenses MaxMemPerLimit NodeDown NonZeroExitCode None OutOfMemory
PartitionConfig PartitionDown PartitionInactive PartitionNodeLimit PartitionTimeLimit PowerNotAvail PowerReserved
Priority Prolog QOSJobLimit QOSNotAllowed QOSResourceLimit QOSTimeLimit QOSUsageThreshold RaisedSignal ReqNodeNotAvail
Reservation ReservationDeleted ReservationInvalid Resources SchedDefer SystemFailure TimeLimit WaitingForScheduling
AssocGrpCpuLimit AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpJobsLimit AssocGrpMemLimit
AssocGrpNodeLimit AssocGrpSubmitJobsLimit AssocGrpWallLimit AssocMaxJobsLimit AssocMaxCpuPerJobLimit
AssocMaxCpuMinutesPerJobLimit AssocMaxNodePerJobLimit AssocMaxSubmitJobLimit AssocMaxWallDurationPerJobLimit
QOSGrpCpuLimit QOSGrpCPUMinutesLimit QOSGrpCPURunMinutesLimit QOSGrpJobsLimit QOSGrpMemLimit QOSGrpNodeLimit
QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSMaxCpuPerJobLimit QOSMaxCpuMinutesPerJobLimit QOSMaxCpuPerUserLimit
QOSMaxJobsPerUserLimit QOSMaxNodePerJobLimit QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit
QOSMaxWallDurationPerJobLimit QOSMinCpuNotSatisfied MaxJobsPerAccount MaxSubmitJobsPerAccount
{" ".join(LIMITS.format(*[resource] * 15) for resource in RESOURCES)}
"""


@pytest.mark.parametrize("reason", KNOWN.split())
def test_reason_is_known(reason: str) -> None:
    assert explain(reason) != UNKNOWN


@pytest.mark.parametrize(
    ("ended_by", "reasons"),
    [
        (
            NEVER,
            "PartitionTimeLimit PartitionNodeLimit PartitionConfig BadConstraints DependencyNeverSatisfied InvalidQOS "
            "InvalidAccount QOSNotAllowed AccountNotAllowed ReservationDeleted QOSMaxWallDurationPerJobLimit "
            "AssocMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit QOSMaxCpuMinutesPerJobLimit QOSMinGRES "
            "QOSMinCpuNotSatisfied MaxMemPerLimit DeadLine QOSTimeLimit AssociationTimeLimit",
        ),
        (
            ITSELF,
            "Priority Resources BeginTime Dependency ReqNodeNotAvail Licenses None QOSMaxJobsPerUserLimit "
            "AssocGrpCpuLimit AssocMaxJobsLimit QOSGrpNodeLimit QOSJobLimit MaxJobsPerAccount QOSMaxGRESPerUser "
            "BurstBufferStageIn Reservation Constraints AssocGrpCPURunMinutesLimit QOSGrpGRESRunMinutes",
        ),
        (USER, "JobHeldUser JobLaunchFailure JobHoldMaxRequeue BurstBufferOperation"),
        (ADMIN, "JobHeldAdmin PartitionDown PartitionInactive AssocGrpCPUMinutesLimit QOSGrpCPUMinutesLimit"),
    ],
)
def test_it_is_known_who_ends_it(ended_by: str, reasons: str) -> None:
    assert {reason: explain(reason).ended_by for reason in reasons.split()} == dict.fromkeys(reasons.split(), ended_by)


def test_what_is_not_ended_by_waiting_says_what_to_do() -> None:
    idle = [reason for reason in KNOWN.split() if explain(reason).ended_by != ITSELF and not explain(reason).to_do]
    assert idle == []


@pytest.mark.parametrize(
    ("said", "word"),
    [
        ("(Resources)", "Resources"),
        ("ReqNodeNotAvail, UnavailableNodes:n[1-2]", "ReqNodeNotAvail"),
        ("ReqNodeNotAvail(Unavailable:n1)", "ReqNodeNotAvail"),
        ("", "None"),
    ],
)
def test_word_is_found_in_what_squeue_prints(said: str, word: str) -> None:
    assert explain(said) == explain(word)


@pytest.mark.parametrize(
    "said",
    ["launch failed requeued held", "job requeued in held state", "user env retrieval failed requeued held"],
)
def test_job_that_slurm_holds_is_to_be_released(said: str) -> None:
    reason = explain(said)
    assert (reason.text, reason.ended_by, reason.to_do) == (
        f"Slurm holds it until it is released ({said})",
        USER,
        "scontrol release JOB_ID",
    )
