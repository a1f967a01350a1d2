"""The name of this machine's cluster, wherever Slurm's configuration lies."""

from pathlib import Path

import pytest

from cluster.clusters import cluster_name
from tests.executables import put_answer, put_executable


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("# ClusterName=no\nclustername = Here  # ours\n", "here"),
        ('ClusterName="West-1"\n', "west-1"),
        ("SlurmctldHost=a\nClusterName=x#y\n", "x"),
    ],
    ids=["commented", "quoted", "comment behind it"],
)
def test_name_is_read_from_slurm_conf_in_lower_case(tmp_path: Path, text: str, name: str) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(text)
    assert cluster_name({"SLURM_CONF": str(conf)}) == name


@pytest.mark.parametrize("conf", ["not there", "Include /etc/slurm/names.conf\n"])
def test_slurmctld_is_asked_where_no_file_names_the_cluster(tmp_path: Path, conf: str) -> None:
    put_answer(tmp_path, "scontrol", "CliFilterPlugins        = (null)\nClusterName             = West\n")
    path = tmp_path / "slurm.conf"
    if conf.startswith("Include"):
        path.write_text(conf)
    assert cluster_name({"SLURM_CONF": str(path), "PATH": str(tmp_path)}) == "west"


def test_slurmctld_that_does_not_answer_in_time_names_none(tmp_path: Path) -> None:
    put_executable(tmp_path, "scontrol", "exec /bin/sleep 60")
    assert cluster_name({"SLURM_CONF": "/no", "PATH": str(tmp_path)}, timeout_s=0.1) == ""
    assert cluster_name({"SLURM_CONF": "/no", "PATH": "/no"}) == ""


def test_cluster_of_a_job_and_the_users_choice_win_over_the_file(tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text("ClusterName=here\n")
    environ = {"SLURM_CONF": str(conf), "SLURM_CLUSTER_NAME": "there"}
    assert cluster_name(environ) == "there"
    assert cluster_name(environ | {"SLURM_CLUSTERS": "West"}) == "west"
    assert [cluster_name(environ | {"SLURM_CLUSTERS": many}) for many in ("all", "a,b")] == ["", ""]
