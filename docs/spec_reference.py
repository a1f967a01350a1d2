"""Write docs/spec.md and docs/spec.schema.json from the spec's models: python -m docs.spec_reference.

A test holds them equal.
"""

import json
import sys
from pathlib import Path

from pydantic import BaseModel

from cluster.schema import docstrings, schema
from cluster.spec import SECTION_MODELS

HEAD = """\
# Every key of a spec

Written by `python -m docs.spec_reference` from the docstrings in `cluster/spec.py`; edit those.

A spec is one YAML file. Unknown and duplicate keys are refused, nothing is converted in silence, and every problem of a
file is told at once with its line. A key that is not wanted is left out: an empty value or `null` is refused. Any key
can be given on the command line instead, as `key=value` or `section.key=value`, by the same rules. Required are `name`,
and `time_limit` on Slurm.

- Text that YAML would read as something else (`no`, `010`, `1_000`, `2024-01-01`) is refused: put it in quotes. Text
  with colons stays text.
- Times are Slurm's six forms: `minutes`, `M:S`, `H:M:S`, `D-H`, `D-H:M`, `D-H:M:S`. There is no `H:M`: `4:00` is four
  minutes.
- Memory has a unit: `K`, `M`, `G` or `T`, powers of 1024.
- Relative paths start at the folder in which you submit.
"""


def default_of(model: type[BaseModel], name: str) -> str:
    """How a default is shown; those that depend on other keys are explained in the text."""
    field = model.model_fields[name]
    if field.is_required():
        return "required"
    if field.default_factory is not None or field.default is None or field.default in ((), {}):
        return ""
    value = field.default
    if isinstance(value, tuple):
        return f"`[{', '.join(value)}]`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(model: type[BaseModel]) -> str:
    """One row for each key of a section."""
    texts = docstrings(model)
    rows = [
        f"| `{name}` | {default_of(model, name)} | {' '.join(texts[name].split()).replace('|', chr(92) + '|')} |"
        for name in model.model_fields
        if name not in SECTION_MODELS
    ]
    return "\n".join(["| key | default | meaning |", "| --- | --- | --- |", *rows])


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, model in SECTION_MODELS.items():
        title = f"## `{name}:`" if name else "## Top level"
        parts.append(f"{title}\n\n{' '.join((model.__doc__ or '').split())}\n\n{table(model)}\n")
    return "\n".join(parts)


def render_schema() -> str:
    """The schema, for editors."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("spec.md").write_text(render())
    Path(__file__).with_name("spec.schema.json").write_text(render_schema())
    sys.stdout.write("docs/spec.md and docs/spec.schema.json written\n")
