"""Host lists as scontrol itself expands them; it needs no controller for that."""

import subprocess
from collections.abc import Mapping

import pytest

from cluster.allocation import AllocationError, expand_nodelist

ACCEPTED = [
    "n1",
    "n1,n2,login",
    "n3,n1,n3",
    "n[1-3]",
    "n[1-1]",
    "n[5]",
    "n[3,1]",
    "n[08-10]",
    "n[9-11]",
    "n[099-101]",
    "n[001-2]",
    "n[1-0002]",
    "n[00-2]",
    "n[01-03,7,005]",
    "n01[1-2]",
    "[1-3]",
    "10.0.0.[1-2],gpu-a_b.site",
    "n-1[2-3]",
    "rack[1-2]n[08-09],x",
    "n[1-2][3-4]",
    "a[001-003,07]b-[1-2]",
    "a[1-2]b[3-5]c[6-7]",
    "a[2,1]b[1-2]c[1-2],x",
    "a[1-2]b[1-2]c[1-2]d[1-2]",
    "n[1-16384]",
    "r[1-16]n[01-32]c[1-32]",
    "n[1-65536]",
    ",".join(f"host{number}" for number in range(1, 20_000, 7)),
]
REFUSED = [
    "n[]",
    "n[3-1]",
    "n[10-9]",
    "n[a-b]",
    "n[1x2]",
    "n[1-2-3]",
    "n[-1]",
    "n[1,]",
    "n[,1]",
    "n[0-65536]",
    "n[1-99999999999]",
]


def hostnames(text: str, environ: Mapping[str, str]) -> str:
    """What `scontrol show hostnames` prints, a name per line; nothing for what it refuses, and its exit status is 0."""
    return subprocess.run(
        ["scontrol", "show", "hostnames", text], env=dict(environ), stdout=subprocess.PIPE, text=True, check=False
    ).stdout


@pytest.mark.parametrize("text", ACCEPTED, ids=lambda text: text[:30])
def test_host_list_expands_as_scontrol_expands_it(text: str, slurm_environ: Mapping[str, str]) -> None:
    assert expand_nodelist(text) == tuple(hostnames(text, slurm_environ).split())


@pytest.mark.parametrize("text", REFUSED)
def test_what_scontrol_refuses_is_an_error(text: str, slurm_environ: Mapping[str, str]) -> None:
    with pytest.raises(AllocationError):
        expand_nodelist(text)
    assert hostnames(text, slurm_environ) == ""


@pytest.mark.parametrize("text", ["n[[1-2]]", "n[1-2]]"])
def test_brackets_that_do_not_pair_are_an_error_whatever_scontrol_makes_of_them(
    text: str, slurm_environ: Mapping[str, str]
) -> None:
    """Slurm 22.05 refuses them; 24.11 prints names with a bracket in them, which no node has."""
    with pytest.raises(AllocationError):
        expand_nodelist(text)
    assert all("]" in name for name in hostnames(text, slurm_environ).split())


@pytest.mark.parametrize("text", ["n[1-2]s", "n[01-02]-ib,x", "a[1-2]b[1-2]c[1-2]s"])
def test_text_after_the_last_bracket_is_kept_where_scontrol_keeps_it(
    text: str, slurm_environ: Mapping[str, str]
) -> None:
    """Slurm 24.11 keeps it, 22.05 refuses the list and prints no name."""
    assert tuple(hostnames(text, slurm_environ).split()) in {expand_nodelist(text), ()}
