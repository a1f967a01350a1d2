"""Constraints: text of sbatch's --constraint -> [features] -> fit.  Standard library only.

    a100            nodes with the feature
    a100&ib  a|b    AND, OR; with both on one level and no parentheses Slurm reads from left to right
    (a|b)&ib        parentheses
    [a|b]           all nodes with a, or all with b
    [a*2&b*4]  a*2  at least so many nodes with each
Sources: sbatch(1), --constraint, Slurm 22.05; `[a|b]`, `a*1&b*1` and both readings of `ib&a|b` tried on 22.05.8.
"""

import re
from collections.abc import Sequence, Set

TOKEN = re.compile(r"\s*([A-Za-z0-9_.:/=+%@~-]+(?:\*[0-9]+)?|[&|()\[\]])")


def names_of(constraint: str) -> tuple[str, ...]:
    """Features that a constraint speaks of, each once."""
    return tuple(dict.fromkeys(token.partition("*")[0] for token in _tokens(constraint) if token[0] not in "&|()[]"))


def maybe_num_nodes(constraint: str, features: Sequence[Set[str]]) -> int | None:
    """On how many nodes at most a job with this constraint can run; None for a constraint that is not weighed here.

    features: those of each node.
    """
    tokens = _tokens(constraint)
    if not tokens or any("*" in token for token in tokens):
        return None
    if "[" not in tokens:
        return _count(tokens, features)
    if tokens[0] != "[" or tokens.index("]") != len(tokens) - 1:
        return None
    inner = tokens[1:-1]
    if any(token in "&()[]" for token in inner):
        return None
    return max((_count([name], features) or 0 for name in inner if name != "|"), default=None)


def _count(tokens: Sequence[str], features: Sequence[Set[str]]) -> int | None:
    """Nodes that satisfy an expression without brackets."""
    verdicts = [_Expression(list(tokens), has).whole() for has in features]
    return None if None in verdicts else sum(map(bool, verdicts))


class _Expression:
    """An expression's truth on one node, found by descent; None when it is none."""

    def __init__(self, tokens: list[str], has: Set[str]) -> None:
        self.tokens, self.has = tokens, has

    def whole(self) -> bool | None:
        value = self._chain()
        return None if self.tokens else value

    def _chain(self) -> bool | None:
        value = self._term()
        while value is not None and self.tokens and self.tokens[0] in "&|":
            operator, other = self.tokens.pop(0), self._term()
            if other is None:
                return None
            value = (value and other) if operator == "&" else (value or other)
        return value

    def _term(self) -> bool | None:
        if not self.tokens:
            return None
        token = self.tokens.pop(0)
        if token == "(":
            value = self._chain()
            return value if self.tokens and self.tokens.pop(0) == ")" else None
        return None if token in "&|)[]" else token in self.has


def _tokens(constraint: str) -> list[str]:
    """Its names and signs; nothing for what has characters that are not known here."""
    tokens, position = [], 0
    while position < len(constraint.rstrip()):
        match = TOKEN.match(constraint, position)
        if match is None:
            return []
        tokens.append(match[1])
        position = match.end()
    return tokens
