"""The environment that a job gets from the one it is submitted in."""

from cluster.environment import clean_environment


def test_environment_of_a_job_is_free_of_the_job_and_the_launcher_it_was_submitted_from() -> None:
    kept = {
        "PATH": "/bin",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_CLUSTERS": "west",
        "SLURM_JWT": "token",
        "CLUSTER_NAME": "the site's own",
        "RANKING": "1",
        "CUDA_VISIBLE_DEVICES": "2,3",
    }
    dropped = (
        "SLURM_JOB_ID SLURM_MEM_PER_CPU SLURM_EXPORT_ENV SBATCH_PARTITION SRUN_CPUS_PER_TASK SALLOC_QOS "
        "PMI_RANK PMI2_RANK PMIX_RANK SUBMITIT_EXECUTOR RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK "
        "MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID CLUSTER_ATTEMPT CLUSTER_TOKEN CLUSTER_MASTER_ADDR "
        "CLUSTER_MASTER_PORTS CLUSTER_KILL_WAIT_S"
    )
    assert clean_environment(kept | dict.fromkeys(dropped.split(), "1")) == kept
