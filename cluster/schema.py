"""JSON Schema of a spec, for editors: job spec -> [schema] -> docs/spec.schema.json, `cluster.submit --schema`.

It knows keys, types, choices and bounds.  What a text means, and the rules between keys, load_spec alone checks.
Source: JSON Schema, draft 2020-12.
"""

import ast
import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from cluster.spec import SECTION_MODELS, JobSpec

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    """The schema of a spec file."""
    made = JobSpec.model_json_schema()
    for model in SECTION_MODELS.values():
        part = made if model is JobSpec else made["$defs"][model.__name__]
        texts = docstrings(model)
        for name, field in part["properties"].items():
            part["properties"][name] = described(field, texts[name])
    return {"$schema": DIALECT, **made, "title": "slurm-ddp spec"}


def described(field: Mapping[str, Any], text: str) -> dict[str, Any]:
    """A key's schema with its text, and without what no spec may hold: null, and the default that stands for it."""
    kept = {key: value for key, value in field.items() if key != "title" and not (key == "default" and value is None)}
    choices = [choice for choice in kept.pop("anyOf", []) if choice != {"type": "null"}]
    if len(choices) == 1:
        kept |= choices[0]
    elif choices:
        kept["anyOf"] = choices
    return {"description": " ".join(text.split()), **kept}


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The text under each field of a model."""
    tree = ast.parse(inspect.getsource(model)).body[0]
    assert isinstance(tree, ast.ClassDef)
    pairs = zip(tree.body, tree.body[1:], strict=False)
    return {
        field.target.id: ast.literal_eval(text.value)
        for field, text in pairs
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr)
    }
