"""Errors in the user's words: pydantic's findings -> [one line each, with its place] -> SpecError of the job spec."""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from cluster.spec_names import KEY_OF_FLAG
from cluster.spec_rules import Contradiction
from cluster.spec_yaml import Document, Entry, Key, Problem, Unclear, dotted, entry

# pydantic's type of error -> what the user reads; {text} is the value as it stands in the file.
WORDS = {
    "bool_type": "{text} is neither true nor false",
    "dict_type": "expected a mapping of names to values, got {text}",
    "finite_number": "{text} is no finite number",
    "float_type": "{text} is no number",
    "greater_than": "{text} is too small; it must be more than {gt}",
    "greater_than_equal": "{text} is too small; the least is {ge}",
    "int_type": "{text} is no whole number",
    "less_than": "{text} is too large; it must be less than {lt}",
    "less_than_equal": "{text} is too large; the most is {le}",
    "missing": "is required; add it",
    "model_type": "expected a section of keys, got {text}",
    "is_instance_of": "{text} is no path; put it in quotes if it is one",
    "string_type": "expected text, got {text}; put it in quotes if it is text",
    "tuple_type": "expected a list, such as [one, two], got {text}",
    "value_error": "{error}",
}
UNCLEAR = {
    "nothing": "has no value; give one, or leave the key out",
    "alias": "{text} is a YAML alias, which a spec doesn't use; write the value itself, in quotes if it is text",
    "anchor": "{text} is a YAML anchor, which a spec doesn't use; write the value itself, in quotes if it is text",
    "tag": "{text} is a YAML tag, which a spec doesn't use; write the value itself, in quotes if it is text",
    "truth": "{text} may be read as true or false; put it in quotes",
    "number": "{text} may be read as another number; put it in quotes",
    "date": "{text} may be read as a date; put it in quotes",
}
MAX_HINTS = 100  # near matches take long to find, and a file of nothing but unknown keys is another file

UNCLEAR_NUMBER = "{text} is not clear; write a plain decimal number of at most 18 digits"
UNCLEAR_TRUTH = "{text} is not clear; write true or false"


def explain(error: ValidationError, document: Document, model: type[BaseModel]) -> dict[Key, Problem]:
    """One problem for each key that pydantic refuses.

    model: the whole spec's, whose keys are offered in place of unknown ones.
    """
    problems: dict[Key, Problem] = {}
    for found in error.errors():
        key = _key_of(found)
        noted_by_reader = found["type"] == "missing" and key in document.places
        if found["type"] != "default_factory_not_called" and not noted_by_reader and key not in problems:
            maybe_model = model if len(problems) < MAX_HINTS else None
            problems[key] = Problem(document.place(key).line, dotted(key), _message(found, key, document, maybe_model))
    return problems


def explain_rules(broken: Iterable[Contradiction], document: Document, refused: Collection[Key]) -> Iterator[Problem]:
    """One problem for each broken rule, at the later of its keys; none where one of the keys is refused already."""
    for rule in broken:
        if any(key[: len(wrong)] == wrong for key in rule.keys for wrong in refused):
            continue
        if rule.maybe_missing in document.places:  # given, but unreadable, which is noted
            continue
        if rule.maybe_missing is not None:
            yield Problem(document.place(rule.maybe_missing[:-1]).line, dotted(rule.maybe_missing), rule.message)
            continue
        given = [key for key in rule.keys if key in document.places]
        later = max(given, key=lambda key: document.places[key].line)
        yield Problem(document.places[later].line, dotted(later), rule.message)


def _key_of(found: ErrorDetails) -> Key:
    """Where pydantic found an error; a name in a mapping stands for its value as well."""
    loc = found["loc"]
    named = loc[:-1] if len(loc) > 2 and loc[-1] == "[key]" else loc
    return tuple(entry(part) if isinstance(part, int) else part for part in named)


def _message(found: ErrorDetails, key: Key, document: Document, maybe_model: type[BaseModel] | None) -> str:
    """maybe_model: whose keys are offered in place of an unknown one, if any are."""
    kind, value = found["type"], found["input"]
    if kind == "extra_forbidden":
        return f"unknown key{_near_key(key, maybe_model) if maybe_model is not None else ''}"
    if isinstance(value, Unclear):
        return _unclear_message(value, kind)
    text = document.place(key).text
    if kind == "literal_error":
        return _choice_message(text, value, found["ctx"]["expected"])
    if kind == "string_type" and isinstance(value, bool | int | float):
        return f"{text} is read as {'true or false' if isinstance(value, bool) else 'a number'}; put it in quotes"
    template = WORDS.get(kind)
    return template.format(text=text, **found.get("ctx", {})) if template else found["msg"]


def _unclear_message(value: Unclear, kind: str) -> str:
    template = UNCLEAR[value.kind]
    if value.kind == "number" and kind in ("int_type", "float_type"):
        template = UNCLEAR_NUMBER
    if value.kind == "truth" and kind == "bool_type":
        template = UNCLEAR_TRUTH
    return template.format(text=value.text)


def _choice_message(text: str, value: object, expected: str) -> str:
    if "'" not in expected:
        return f"{text} is not known here; use {expected}"
    choices = re.findall("'([^']*)'", expected)
    return f"{text} is not known here; use {expected.replace(chr(39), '')}{_did_you_mean(value, choices)}"


def _near_key(key: Key, model: type[BaseModel]) -> str:
    """A hint at the key that was meant: of the same section, of another one, or the one that writes an sbatch flag."""
    sections = {name: _keys(field.annotation) for name, field in model.model_fields.items()}
    section, name = ("", *(part for part in key if not isinstance(part, Entry)))[-2:]
    flag = KEY_OF_FLAG.get(name.replace("_", "-"))
    if flag and not section:
        return f"; did you mean {flag}?"
    if section and name in sections:
        return f"; did you mean {name}, outside of {section}?"
    elsewhere = [f"{other}.{name}" for other, keys in sections.items() if name in keys]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return _did_you_mean(name, sections[section] if section else list(sections))


def _keys(annotation: object) -> list[str]:
    """Keys of a section, or of each one in a list of sections; none of a plain field."""
    if get_origin(annotation) is tuple:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return list(annotation.model_fields)
    return []


def _did_you_mean(value: object, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(value), choices, n=1)
    return f"; did you mean {near[0]}?" if near else ""
