"""Slurm's written quantities: text of the spec -> [seconds, MiB, GPUs] -> job spec.  Standard library only.

Sources: sbatch(1), --time, --mem, --gpus-per-node, Slurm 22.05.
"""

import math
import re
from fractions import Fraction

# Only the first field may exceed its range: 90:00 is 90 minutes, 1:90:00 is refused.
FIRST = r"(?P<{}>[0-9]{{1,7}})"
HOURS = r"(?P<hours>[01]?[0-9]|2[0-3])"
MINUTES = r"(?P<minutes>[0-5]?[0-9])"
SECONDS = r"(?P<seconds>[0-5]?[0-9])"
TIME_FORMS = tuple(
    re.compile(form)
    for form in (
        FIRST.format("minutes"),
        FIRST.format("minutes") + f":{SECONDS}",
        FIRST.format("hours") + f":{MINUTES}:{SECONDS}",
        FIRST.format("days") + f"-{HOURS}",
        FIRST.format("days") + f"-{HOURS}:{MINUTES}",
        FIRST.format("days") + f"-{HOURS}:{MINUTES}:{SECONDS}",
    )
)
TIME_WORDS = "use minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S"
SECONDS_IN = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}
MAX_TIME_S = 10 * 365 * 86_400  # no site runs longer; far below Slurm's 32 bits of minutes

MEMORY = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGT])")
MEBIBYTES_IN = {"K": Fraction(1, 1024), "M": Fraction(1), "G": Fraction(1024), "T": Fraction(1024**2)}

NODES = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")
MAX_NODES = 65_533

# A type needs a letter, or is a model of four digits: 8:8 is a slip, 1080:8 and 3g.20gb:2 are not.
GPUS = re.compile(r"(?:([A-Za-z0-9_.-]*[A-Za-z][A-Za-z0-9_.-]*|[0-9]{4}):)?([1-9][0-9]{0,3})")


def time_s(text: str) -> int:
    """Seconds in one of Slurm's six forms of a time.

    Raises ValueError: the text has another form, a field is out of range, or the time is 0.
    """
    match = next((match for form in TIME_FORMS if (match := form.fullmatch(text))), None)
    if match is None:
        raise ValueError(f"{text!r} is no Slurm time; {TIME_WORDS}")
    total = sum(SECONDS_IN[unit] * int(number) for unit, number in match.groupdict().items())
    if total == 0:
        raise ValueError(f"{text!r} is 0, which Slurm takes as no limit; give the time the run may take")
    if total > MAX_TIME_S:
        raise ValueError(f"{text!r} is longer than 10 years; {TIME_WORDS}")
    return total


def slurm_time(seconds: int) -> str:
    """Seconds as `[D-]HH:MM:SS`, which has one reading."""
    days, rest = divmod(seconds, 86_400)
    clock = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}-{clock}" if days else clock


def memory_mib(text: str) -> int:
    """MiB in an amount with unit, rounded up: Slurm takes whole numbers only.

    Raises ValueError: no number with K, M, G or T, or the amount is 0.
    """
    match = MEMORY.fullmatch(text)
    if match is None:
        number = re.match(r"[0-9]+(\.[0-9]+)?", text)
        hint = f"; did you mean {number.group()}{_unit_meant(text)}?" if number else ", such as 16G"
        raise ValueError(f"{text!r} is no amount of memory; use a number with K, M, G or T{hint}")
    amount = Fraction(match[1]) * MEBIBYTES_IN[match[2]]
    if amount == 0:
        raise ValueError(f"{text!r} is 0, by which Slurm means all memory of the node; give the amount")
    return math.ceil(amount)


def node_range(value: int | str) -> tuple[int, int]:
    """Fewest and most nodes in 4 or `2-4`.

    Raises ValueError: another form, no node, or the fewest are not fewer than the most.
    """
    match = NODES.fullmatch(str(value))
    fewest, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= fewest <= most <= MAX_NODES or (isinstance(value, str) and fewest == most):
        raise ValueError(
            f"{value!r} is no number of nodes; use 4, or 2-4 for at least 2 and at most 4 (to {MAX_NODES})"
        )
    return fewest, most


def _unit_meant(text: str) -> str:
    """K, M, G or T for 16g, 16GB and 16 GiB; G for a bare number."""
    letter = text.lstrip("0123456789. ")[:1].upper()
    return letter if letter in MEBIBYTES_IN else "G"


def num_gpus(text: str) -> int:
    """GPUs in `8` or `a100:8`.

    Raises ValueError: another form, or 0.
    """
    match = GPUS.fullmatch(text)
    if match is None or match[1] == "gpu":
        raise ValueError(f"{text!r} is no number of GPUs; use 8 or type:number, such as a100:8")
    return int(match[2])
