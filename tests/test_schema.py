"""The schema that editors get: it takes what the loader takes, and refuses what an editor can know to be wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.schema import schema
from cluster.spec import JobSpec
from cluster.spec_yaml import read_document
from docs.spec_reference import render_schema
from tests.test_spec import RIGHT

REPOSITORY = Path(__file__).parents[1]
CONFIGS = sorted((REPOSITORY / "configs").glob("*.yaml"))
SCHEMA = schema()


def complaints(text: str) -> list[str]:
    """What a validator says of a spec's text; with the spec's own reading of YAML."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    return sorted(error.message for error in validator.iter_errors(plain(read_document(text).values)))


def plain(value: object) -> Any:  # noqa: ANN401
    """With lists for tuples, as JSON has them."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def text_with(key: str, value: str) -> str:
    section, _, name = key.rpartition(".")
    return f"name: demo\n{section}: {{{name}: {value}}}\n" if section else f"name: demo\n{key}: {value}\n"


def test_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("key", [key for key in RIGHT if key != "name" and key.partition(".")[0] not in ("faults",)])
def test_right_value_of_each_key_passes(key: str) -> None:
    assert complaints(text_with(key, RIGHT[key])) == []


@pytest.mark.parametrize("text", ["time_limit: 60", "nodes: 2-4", "gpus_per_node: 2", "sbatch: {hold: true}"])
def test_values_of_two_types_pass(text: str) -> None:
    assert complaints(f"name: demo\n{text}\n") == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("partiton: gpu", "Additional properties are not allowed ('partiton' was unexpected)"),
        ("train: {epoch: 3}", "Additional properties are not allowed ('epoch' was unexpected)"),
        ("cluster: slrm", "'slrm' is not one of ['slurm', 'local']"),
        ("train: {epochs: 0}", "0 is less than the minimum of 1"),
        ("setup: module load cuda", "'module load cuda' is not of type 'array'"),
    ],
)
def test_mistake_that_an_editor_can_know_is_told(text: str, complaint: str) -> None:
    assert complaints(f"name: demo\n{text}\n") == [complaint]


def test_every_key_has_a_description() -> None:
    parts = [SCHEMA, *SCHEMA["$defs"].values()]
    texts = [field.get("description", "") for part in parts for field in part["properties"].values()]
    assert len(texts) > len(JobSpec.model_fields)
    assert all(texts)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_shipped_config_names_the_schema_and_passes_it(config: Path) -> None:
    text = config.read_text(encoding="utf-8")
    (target,) = [line.partition("$schema=")[2] for line in text.splitlines() if "yaml-language-server:" in line]
    assert (config.parent / target).resolve() == REPOSITORY / "docs" / "spec.schema.json"
    assert complaints(text) == []
    assert yaml.safe_load(text)["name"]


def test_submit_prints_the_schema() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.submit", "--schema"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (0, "", json.loads(render_schema()))
