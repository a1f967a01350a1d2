"""YAML with places: spec file, overrides -> [values, each with its line] -> job spec.  pyyaml only.

A loader of our own on PyYAML's event stream, for what the stock loaders do to a spec without a word: YAML 1.1 reads
12:00:00 as 43200, 010 as 8, no as False, 1e-3 as text, and keeps the last of two equal keys.  Here plain text has
one reading or none: what YAML 1.1 and 1.2 read differently becomes Unclear, which no field of the spec accepts.
Sources: yaml.org, type repository of YAML 1.1 and "Core Schema" of YAML 1.2.2.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import yaml

Key = tuple[str, ...]  # ("train", "lr"); ("setup", "[0]") is an entry of a list

WHOLE_FILE = 0  # as a line: the file, not a line of it
COMMAND_LINE = sys.maxsize  # as a line: an override; sorts after every line

MAX_BYTES = 1 << 16  # of a file; ranks get it as one environment variable, of which Linux takes twice as much
MAX_DEPTH = 8  # the spec needs 3; bounds the recursion
MAX_DIGITS = 18  # of a whole number; fits 64 bits
MAX_SHOWN = 60  # characters of a value repeated in a message

WHOLE = re.compile(r"[-+]?(0|[1-9][0-9]*)")
DECIMAL = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
OTHER_NUMBER = re.compile(r"[-+]?(0[xob][0-9a-fA-F_]+|\.?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?)")
OTHER_TRUTH = re.compile(r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF")
DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?")
TRUTHS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
NOTHINGS = frozenset({"", "~", "null", "Null", "NULL"})


@dataclass(frozen=True, slots=True)
class Unclear:
    """A value that a spec doesn't take in any field; kind says why."""

    text: str
    kind: Literal["nothing", "truth", "number", "date", "alias", "anchor", "tag"]


class Place(NamedTuple):
    """Where a value stands, and how it was written there."""

    line: int  # from 1; of the key, or of the entry in a list
    text: str  # as a message shows it: 010, '10:00:', a list


class Problem(NamedTuple):
    """One thing to mend; sorts by line."""

    line: int
    key: str  # dotted: train.lr; empty for the file as a whole
    message: str

    def render(self, source: str) -> str:
        """The one line a user reads, such as `configs/4node.yaml:7: train.lr: ...`; what cannot be seen is escaped."""
        text = ": ".join(part for part in (where(source, self.line), self.key, self.message) if part)
        return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def where(source: str, line: int) -> str:
    """A line of a source as messages name it: `configs/4node.yaml:7`."""
    return {WHOLE_FILE: source, COMMAND_LINE: "command line"}.get(line, f"{source}:{line}")


@dataclass(frozen=True, slots=True)
class Document:
    """The values of a file and its overrides, with their places, and what is wrong with them so far."""

    values: dict[str, object] = field(default_factory=dict)  # dict, tuple, str, int, float, bool or Unclear
    places: dict[Key, Place] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place(self, key: Key) -> Place:
        """Place of a key, or of the nearest section around it; the file itself is at line 1."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places.get(key, Place(1, "nothing"))

    def complain(self, line: int, key: Key, message: str) -> None:
        """Note something to mend."""
        self.problems.append(Problem(line, dotted(key), message))


class _Refusal(Exception):
    """YAML that a spec doesn't use, at a line."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line


class Entry(str):
    """Part of a key that stands for an entry of a list; a key of a mapping may have the same text."""

    __slots__ = ()


def entry(number: int) -> Entry:
    """The part for an entry of a list, counted from 0."""
    return Entry(f"[{number}]")


def dotted(key: Key) -> str:
    """A key as users write it, on one line; entries of a list go by the list's name."""
    return ".".join(_readable(part) for part in key if not isinstance(part, Entry))


def _readable(part: str) -> str:
    return part if part.isprintable() and len(part) <= MAX_SHOWN else shown(part)


def shown(text: str) -> str:
    """Text as a message repeats it: quoted, on one line, not too long."""
    return repr(text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 3] + "...")


def read_document(text: str) -> Document:
    """Read the text of a spec file.  One without values has a problem that says why."""
    document = Document()
    try:
        value = _Reader(document, yaml.parse(text, Loader=yaml.SafeLoader)).read_root()
    except (yaml.YAMLError, _Refusal) as error:
        document.complain(_line_of(error, text), (), _words_of(error))
        return document
    if isinstance(value, dict) and value:
        document.values.update(value)
    elif not value or (isinstance(value, Unclear) and value.kind == "nothing"):
        document.complain(1, (), "the file is empty; a spec needs a name, such as name: demo")
    else:
        document.complain(1, (), f"expected keys at the top, such as name: demo, got {document.place(()).text}")
    return document


def apply_overrides(document: Document, overrides: Sequence[str]) -> None:
    """Put `key=value` and `section.key=value` from the command line in place of what the file says."""
    given: set[Key] = set()
    for override in overrides:
        name, equals, text = override.partition("=")
        key = tuple(name.split(".", 1))
        if not equals or not all(key):
            document.complain(COMMAND_LINE, (), f"{shown(override)} is no section.key=value, such as train.epochs=5")
        elif key in given:
            document.complain(COMMAND_LINE, key, "is given twice")
        else:
            given.add(key)
            _apply_override(document, key, text)


def _apply_override(document: Document, key: Key, text: str) -> None:
    section: object = document.values
    if len(key) == 2:
        section = document.values.setdefault(key[0], {})
        document.places.setdefault(key[:1], Place(COMMAND_LINE, "a section"))
    if isinstance(section, dict):
        for stale in [place for place in document.places if place[: len(key)] == key]:
            del document.places[stale]
        section.pop(key[-1], None)
        try:
            section[key[-1]] = _read_override(document, key, text)
        except (yaml.YAMLError, _Refusal) as error:
            document.complain(COMMAND_LINE, key, _words_of(error))
    elif not isinstance(section, Unclear):  # which is a problem of its own
        document.complain(COMMAND_LINE, key, f"{key[0]} is {document.place(key[:1]).text}, which has no keys")


def _read_override(document: Document, key: Key, text: str) -> object:
    """The value of one override, by the rules of the file.  Raises as the reader does."""
    reader = _Reader(document, yaml.parse(text, Loader=yaml.SafeLoader), key, COMMAND_LINE)
    value = reader.read_root()
    if "#" in text[reader.end :]:
        raise _Refusal(COMMAND_LINE, f"{shown(text)} would lose what follows #; put the value in quotes")
    if isinstance(value, dict) and value:
        raise _Refusal(COMMAND_LINE, f"{shown(text)} is a mapping; give its keys one by one, with a dot between")
    return value


@dataclass(slots=True)
class _Reader:
    """Builds values from PyYAML's events, and notes the place of each."""

    document: Document
    events: Iterator[yaml.Event]
    root: Key = ()
    maybe_fixed_line: int | None = None  # of every value, where the text is not a file
    end: int = 0  # characters read, up to the end of the last value

    def read_root(self) -> object:
        """The one document of the stream.

        Raises yaml.YAMLError: the text is no YAML.
        Raises _Refusal: it is YAML that a spec doesn't use.
        """
        first = self._next_node()
        self.document.places[self.root] = Place(
            self.maybe_fixed_line or 1, "nothing" if first is None else _text_of(first)
        )
        value = Unclear("", "nothing") if first is None else self._read(first, self.root, 1)
        if (second := self._next_node()) is not None:
            raise _Refusal(self._line(second), "a second document begins here; a spec is one")
        return value

    def _next_node(self) -> yaml.NodeEvent | None:
        return next((event for event in self.events if isinstance(event, yaml.NodeEvent)), None)

    def _read(self, event: yaml.Event, key: Key, depth: int) -> object:
        """One value; its event has been taken from the stream, the events inside it have not."""
        if depth > MAX_DEPTH:
            raise _Refusal(self._line(event), f"values are nested more than {MAX_DEPTH} deep")
        value: object = None
        if isinstance(event, yaml.ScalarEvent):
            value = event.value if event.style else read_plain(event.value)
            self._note_end(event)
        elif isinstance(event, yaml.SequenceStartEvent):
            value = self._read_sequence(key, depth)
        elif isinstance(event, yaml.MappingStartEvent):
            value = self._read_mapping(key, depth)
        return _maybe_foreign(event) or value

    def _read_sequence(self, key: Key, depth: int) -> tuple[object, ...]:
        items: list[object] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            inner = (*key, entry(len(items)))
            self.document.places[inner] = Place(self._line(event), _text_of(event))
            items.append(self._read(event, inner, depth + 1))
        self._note_end(event)
        return tuple(items)

    def _read_mapping(self, key: Key, depth: int) -> dict[str, object]:
        values: dict[str, object] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or _maybe_foreign(event):
                raise _Refusal(
                    self._line(event), f"{_text_of(event)} can't be a key; put the value in quotes if it is text"
                )
            inner, value_event = (*key, event.value), next(self.events)
            if event.value in values:
                first = self.document.places[inner].line
                self.document.complain(self._line(event), inner, f"duplicate key; the first is on line {first}")
                self._skip(value_event, depth)
            else:
                self.document.places[inner] = Place(self._line(event), _text_of(value_event))
                values[event.value] = self._read(value_event, inner, depth + 1)
        self._note_end(event)
        return values

    def _skip(self, event: yaml.Event, depth: int) -> None:
        """Read a value without noting it."""
        _Reader(Document(), self.events, (), self.maybe_fixed_line)._read(event, (), depth + 1)

    def _line(self, event: yaml.Event) -> int:
        assert event.start_mark is not None  # PyYAML's parser gives every event its marks
        return self.maybe_fixed_line or event.start_mark.line + 1

    def _note_end(self, event: yaml.Event) -> None:
        assert event.end_mark is not None
        self.end = event.end_mark.index


def read_plain(text: str) -> object:
    """The one reading of a scalar without quotes: text, a truth value, a number; or Unclear.

    Colon numbers, such as 12:00:00, are text.
    """
    if text in NOTHINGS:
        return Unclear(text, "nothing")
    if text in TRUTHS:
        return TRUTHS[text]
    if WHOLE.fullmatch(text):
        return int(text) if len(text) <= MAX_DIGITS else Unclear(text, "number")
    if DECIMAL.fullmatch(text):
        return float(text)
    if NOT_FINITE.fullmatch(text):
        return float(text.replace(".", ""))
    if OTHER_NUMBER.fullmatch(text):
        return Unclear(text, "number")
    if OTHER_TRUTH.fullmatch(text):
        return Unclear(text, "truth")
    return Unclear(text, "date") if DATE.fullmatch(text) else text


def _maybe_foreign(event: yaml.Event) -> Unclear | None:
    """What a spec doesn't use of YAML: aliases, anchors, tags."""
    if isinstance(event, yaml.AliasEvent):
        return Unclear(f"*{event.anchor}", "alias")
    if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent):
        if event.anchor:
            return Unclear(f"&{event.anchor}", "anchor")
        if event.tag:
            return Unclear(event.tag.replace("tag:yaml.org,2002:", "!!"), "tag")
    return None


def _text_of(event: yaml.Event) -> str:
    """A value as a message shows it."""
    if isinstance(event, yaml.ScalarEvent):
        is_text = event.style or isinstance(read_plain(event.value), str)
        return shown(event.value) if is_text else event.value[:MAX_SHOWN]
    return "a list" if isinstance(event, yaml.SequenceStartEvent) else "a mapping"


def _line_of(error: yaml.YAMLError | _Refusal, text: str) -> int:
    if isinstance(error, _Refusal):
        return error.line
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return error.problem_mark.line + 1
    return text.count("\n", 0, getattr(error, "position", 0)) + 1


def _words_of(error: yaml.YAMLError | _Refusal) -> str:
    """PyYAML's many lines as one."""
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character U+{int(error.character):04X} is not allowed in YAML; take it out"
    if isinstance(error, yaml.MarkedYAMLError):
        return "is no YAML: " + ", ".join(part for part in (error.context, error.problem) if part)
    return str(error)
