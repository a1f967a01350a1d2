"""Libraries: spec -> [libraries] -> environment variables that they read when they are loaded.  Never loads torch."""

from collections.abc import Mapping

from cluster.spec import JobSpec


def library_variables(spec: JobSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """What a run sets; the user's own choice of cuBLAS's workspace stays."""
    wanted = {"OMP_NUM_THREADS": str(spec.train.threads_per_rank)}
    if spec.train.deterministic and "CUBLAS_WORKSPACE_CONFIG" not in environ:
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS, "Results reproducibility"
    return wanted
