"""From a YAML spec to a supervised Slurm job.  Never imports torch or jobs."""
