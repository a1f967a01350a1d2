"""Secrets: which names look like them, and what must not be written."""

from pathlib import Path

import pytest

from cluster.secret_names import is_secret, maybe_secret_in, secret_values, without_secrets
from cluster.spec_names import SECRET_REFUSED
from tests.specs import problems, spec_with


@pytest.mark.parametrize(
    "name",
    [
        "TOKEN", "HF_TOKEN", "GITHUBTOKEN", "hf_token", "TOKENS", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID",
        "CLIENT_SECRET", "DB_PASSWORD", "DBPASSWORD", "MYSQL_PASSWD", "SSH_PASSPHRASE", "WANDB_API_KEY", "WANDB_APIKEY",
        "APIKEY", "KEY", "ENCRYPTION_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "AWS_CREDENTIAL_FILE", "HF_TOKEN_PATH",
    ],
)  # fmt: skip
def test_name_of_a_secret_is_known(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "KEYBOARD",
        "MONKEY",
        "PATH",
        "NCCL_DEBUG",
        "MASTER_PORT",
        "SECRETARY",
        "KEYS_PER_SHARD",
    ],
)
def test_other_names_are_not_taken_for_secrets(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize("line", ["env:\n  HF_TOKEN: abcdefgh", "env:\n  HF_TOKEN: 12345678", "env:\n  HF_TOKEN: ''"])
def test_secret_in_the_spec_is_refused_without_its_value(tmp_path: Path, line: str) -> None:
    text = f"name: demo\ntime_limit: 60\n{line}\n"
    assert problems(tmp_path, text) == [f"spec.yaml:4: env.HF_TOKEN: {SECRET_REFUSED}"]


def test_secret_in_an_override_is_refused_without_its_value(tmp_path: Path) -> None:
    found = problems(tmp_path, "name: demo\ntime_limit: 60\n", "env.HF_TOKEN=abcdefgh")
    assert found == [f"command line: env.HF_TOKEN: {SECRET_REFUSED}"]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("export HF_TOKEN=abc", "HF_TOKEN"),
        ("HF_TOKEN=abc python x.py", "HF_TOKEN"),
        ("true;HF_TOKEN='a b'", "HF_TOKEN"),
        ("declare -x WANDB_API_KEY=\"abc\"", "WANDB_API_KEY"),
        ("export HF_TOKEN=$(cat ~/.hf)", None),
        ("export HF_TOKEN=$OTHER", None),
        ("export HF_TOKEN=\"$OTHER\"", None),
        ("export HF_TOKEN=`cat x`", None),
        ("export TOKEN_FILE=/home/me/token", None),
        ("export TOKEN_FILE=~/token", None),
        ("export HF_TOKEN=", None),
        ("export A=HF_TOKEN=b", None),
        ("module load cuda/12.4", None),
    ],
)  # fmt: skip
def test_line_for_the_shell_that_holds_a_secret_names_its_variable(line: str, name: str | None) -> None:
    assert maybe_secret_in(line) == name


def test_setup_line_with_a_secret_is_refused_without_its_value(tmp_path: Path) -> None:
    found = problems(tmp_path, spec_with("setup", "setup: [export HF_TOKEN=abcdefgh]"))
    assert found == [f"spec.yaml:3: setup: HF_TOKEN: {SECRET_REFUSED}"]


def test_values_are_hidden_wherever_they_stand_the_longest_first() -> None:
    environ = {"A_TOKEN": "abcdef", "B_TOKEN": "abcdef-more", "C_TOKEN": "x", "D_TOKEN": "", "PATH": "/usr/bin"}
    values = secret_values(environ)
    assert values == ("abcdef-more", "abcdef")
    text = "x abcdef-more abcdef /usr/bin"
    assert without_secrets(text, values) == "x [hidden] [hidden] /usr/bin"
