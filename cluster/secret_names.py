"""Secrets: names of variables -> [secret_names] -> which of them hold something that no file may show.

A spec is written to the run folder, to job.sbatch and to plan.json, so it may not hold a secret.  The environment of
the submitting shell goes along with a job and is written nowhere.  Standard library only.
"""

import re
from collections.abc import Iterable, Mapping

# HF_TOKEN, AWS_SECRET_ACCESS_KEY, DB_PASSWORD, GOOGLE_APPLICATION_CREDENTIALS; not TOKENIZERS_PARALLELISM, KEYBOARD.
SECRET = re.compile(
    r"(TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL)S?(_|$)|(^|_)(API)?KEYS?$|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY",
    re.IGNORECASE,
)
MIN_LENGTH = 6  # of a value that is looked for in text; shorter ones are in every text
HIDDEN = "[hidden]"

# NAME=text in a line for the shell, where the text stands there itself: not $OTHER, $(command), `command` or a path.
ASSIGNMENT = re.compile(r"""(?:^|[\s;&|(])([A-Za-z_][A-Za-z0-9_]*)=(["']?)([^\s"'`$/~;&|)][^\s;&|)]*)""")


def is_secret(name: str) -> bool:
    """Whether a variable of this name is likely to hold a secret."""
    return SECRET.search(name) is not None


def maybe_secret_in(line: str) -> str | None:
    """The name of a variable to which a line for the shell gives a secret that stands in it."""
    return next((name for name, _, _ in ASSIGNMENT.findall(line) if is_secret(name)), None)


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What must not be written anywhere, the longest first."""
    found = {value for name, value in environ.items() if is_secret(name) and len(value) >= MIN_LENGTH}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def without_secrets(text: str, values: Iterable[str]) -> str:
    """Text in which something else stands in place of each value."""
    for value in values:
        text = text.replace(value, HIDDEN)
    return text
