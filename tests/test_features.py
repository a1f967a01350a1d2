import pytest

from cluster.features import maybe_num_nodes, names_of

# n1 n2 have a100 and ib, n3 has h100 and ib, n4 has cpu.
NODES = [frozenset(words.split()) for words in ("a100 ib", "a100 ib", "h100 ib", "cpu")]


@pytest.mark.parametrize(
    ("constraint", "names"),
    [
        ("a100", ("a100",)),
        ("a100|h100", ("a100", "h100")),
        ("[a100*2&h100*4]", ("a100", "h100")),
        ("(a100 | h100)&ib&ib", ("a100", "h100", "ib")),
        ("a100;rm", ()),  # nothing is concluded from what is not known here
    ],
)
def test_names_in_a_constraint(constraint: str, names: tuple[str, ...]) -> None:
    assert names_of(constraint) == names


@pytest.mark.parametrize(
    ("constraint", "num_nodes"),
    [
        ("a100", 2),
        ("nosuch", 0),
        ("a100&ib", 2),
        ("a100&h100", 0),
        ("a100|h100", 3),
        ("(a100|cpu)&ib", 2),
        ("ib&(h100|cpu)", 1),
        ("ib&a100|h100", 3),
        ("h100|ib&a100", 2),  # from left to right: n3 is not among them, as Slurm 22.05.8 answers
        ("[a100|h100]", 2),
        ("[h100|cpu]", 1),
        ("[a100*1&h100*1]", None),
        ("a100*2", None),
        ("[a100|h100]&ib", None),
        ("a100&", None),
        ("(a100", None),
        ("", None),
    ],
)
def test_nodes_on_which_a_constraint_holds(constraint: str, num_nodes: int | None) -> None:
    assert maybe_num_nodes(constraint, NODES) == num_nodes
