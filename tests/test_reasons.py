"""Pending reasons: every word of Slurm's has a text, and those that never resolve are told from those that do."""

import pytest

from cluster.reasons import ADMIN, ITSELF, NEVER, USER, explain

UNKNOWN = explain("NoSuchReason")

# enum job_state_reason of 22.05, as libslurm names the pending ones; the limits of QOS and associations are families.
KNOWN = """
None Priority Dependency Resources PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive JobHeldAdmin
JobHeldUser BeginTime Licenses SystemFailure JobLaunchFailure InvalidAccount InvalidQOS QOSUsageThreshold QOSJobLimit
QOSResourceLimit QOSTimeLimit Cleaning Prolog QOSNotAllowed AccountNotAllowed DependencyNeverSatisfied
JobArrayTaskLimit BurstBufferResources BurstBufferStageIn BurstBufferOperation PowerNotAvail PowerReserved
ReqNodeNotAvail Reservation ReservationDeleted DeadLine FedJobLock FrontEndDown BadConstraints JobHoldMaxRequeue
PartitionConfig AssociationJobLimit AssociationResourceLimit AssociationTimeLimit MaxMemPerLimit NodeDown
AssocGrpCpuLimit AssocGrpCPUMinutesLimit AssocGrpCPURunMinutesLimit AssocGrpJobsLimit AssocGrpMemLimit
AssocGrpNodeLimit AssocGrpSubmitJobsLimit AssocGrpWallLimit AssocMaxJobsLimit AssocMaxCpuPerJobLimit
AssocMaxNodePerJobLimit AssocMaxWallDurationPerJobLimit AssocMaxSubmitJobLimit AssocGrpGRES AssocMaxGRESPerJob
AssocMaxCpuMinutesPerJobLimit AssocGrpBilling QOSGrpCpuLimit QOSGrpCPUMinutesLimit QOSGrpJobsLimit QOSGrpMemLimit
QOSGrpNodeLimit QOSGrpSubmitJobsLimit QOSGrpWallLimit QOSMaxCpuPerJobLimit QOSMaxCpuMinutesPerJobLimit
QOSMaxNodePerJobLimit QOSMaxWallDurationPerJobLimit QOSMaxCpuPerUserLimit QOSMaxJobsPerUserLimit
QOSMaxNodePerUserLimit QOSMaxSubmitJobPerUserLimit QOSMinCpuNotSatisfied QOSMaxGRESPerUser QOSMinGRES QOSGrpGRES
MaxCpuPerAccount MaxJobsPerAccount MaxNodePerAccount MaxSubmitJobsPerAccount MaxBBPerAccount MaxGRESPerAccount
MaxMemoryPerAccount WaitingForScheduling
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
            "BurstBufferStageIn Reservation",
        ),
        (USER, "JobHeldUser JobLaunchFailure JobHoldMaxRequeue"),
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


def test_job_that_slurm_holds_after_a_failed_start_is_to_be_released() -> None:
    reason = explain("launch failed requeued held")
    assert (reason.text, reason.ended_by, reason.to_do) == (
        "Slurm holds it after a failed start (launch failed requeued held)",
        USER,
        "scontrol release JOB_ID",
    )
