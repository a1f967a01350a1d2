"""Run inside of a job that Slurm ends: prints as JSON what is made of it, from the record, the log, and both."""

import json
import os
from pathlib import Path

from cluster import slurm
from cluster.identity import RunJob
from cluster.job import Job
from cluster.job_end import maybe_job_cause

if __name__ == "__main__":
    job_id = os.environ["SLURM_JOB_ID"]
    path = slurm.maybe_error_path(job_id, os.environ)
    job = Job(RunJob(job_id, Path()), is_on_slurm=True, environ=os.environ, maybe_error_path=path)
    record, lines = job.maybe_record(), job.new_error_lines()
    print(json.dumps([maybe_job_cause(record, lines), maybe_job_cause(record, ()), maybe_job_cause(None, lines)]))
