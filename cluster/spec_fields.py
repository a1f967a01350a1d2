"""Field types of the spec: one value of the YAML -> [check] -> field of the job spec.

Each type refuses what Slurm, the shell or a file system would trip over later.  A check raises ValueError with the
value seen and what to write; pydantic collects these.  Values of a wrong type are passed on: pydantic refuses them.
"""

import re
import unicodedata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
)

from cluster.secret_names import maybe_secret_in
from cluster.spec_names import SECRET_REFUSED, check_flag, check_variable
from cluster.spec_units import MAX_NODES, memory_mib, node_range, num_gpus, time_s
from cluster.spec_yaml import shown

# What sbatch looks for in a script, PBS and BSUB even behind the first command (seen on 22.05).
DIRECTIVE = re.compile(r"\s*(#(SBATCH|SLURM|PBS|BSUB))")

MAX_NAME_BYTES = 128  # half of what a file system takes, so that files may be named after a run

MAIL_TYPES = (
    "NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT", "TIME_LIMIT_90",
    "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS",
)  # fmt: skip


def check_characters(text: str) -> str:
    """Pass text on one line, without characters that a file, a terminal or YAML can't hold as they are."""
    for character in text:
        if unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or character in "\ufffe\uffff":
            raise ValueError(f"{shown(text)} holds the control character U+{ord(character):04X}; take it out")
    return text


def check_line(text: str) -> str:
    """Pass text on one line that isn't empty."""
    if not text.strip():
        raise ValueError("is empty; give a value or leave the key out")
    return check_characters(text)


def check_shell_line(text: str) -> str:
    """Pass one line for the shell; tabs are welcome, directives and secrets are not."""
    check_characters(text.replace("\t", " "))
    if match := DIRECTIVE.match(text):
        raise ValueError(f"{match[1]} begins a directive, which is no line for the shell; use a key, or the key sbatch")
    if name := maybe_secret_in(text):
        raise ValueError(f"{name}: {SECRET_REFUSED}")
    return text


def check_word(text: str) -> str:
    """Pass a name that Slurm knows: one word, and none of sbatch's own."""
    check_line(text)
    if len(text.split()) != 1 or text != text.strip():
        raise ValueError(f"{shown(text)} holds white space; Slurm's names are one word")
    if text.startswith("-"):
        raise ValueError(f"{shown(text)} begins with a dash, as only flags do")
    return check_expanded(text)


def check_expanded(text: str) -> str:
    """Pass text without shell variables: sbatch doesn't expand them in its #SBATCH lines."""
    if "$" in text:
        raise ValueError(f"{shown(text)} holds $, which nobody expands here; write the value itself")
    return text


def check_name(text: str) -> str:
    """Pass the name of a run: it becomes a folder and the job's name."""
    check_line(text)
    if text in (".", "..") or "/" in text or "\\" in text or text.startswith("-") or text != text.strip():
        raise ValueError(
            f"{shown(text)} is no name for a folder; leave out /, \\, a leading dash and outer white space"
        )
    if (size := len(text.encode())) > MAX_NAME_BYTES:
        raise ValueError(f"{shown(text)} has {size} bytes in UTF-8; the most is {MAX_NAME_BYTES}")
    return text


def check_mail_type(text: str) -> str:
    """Pass Slurm's words for when to write a mail, with commas between them."""
    for word in text.split(","):
        if word not in MAIL_TYPES:
            raise ValueError(f"{shown(word)} is no mail type; use some of {', '.join(MAIL_TYPES)}, with commas between")
    return text


def absolute_path(value: object, info: ValidationInfo) -> object:
    """A path as text -> an absolute one, seen from `cwd` in the validation's context."""
    if isinstance(value, str):
        if re.match(r"\s*[~$]", check_line(value)):
            raise ValueError(f"{shown(value)} is not expanded here; write the path itself")
        value = Path(value)
    if isinstance(value, Path) and info.context:
        value = Path(info.context["cwd"]) / value
        check_characters(str(value))
    return value


def check_log_folder(path: Path) -> Path:
    """Pass a folder that Slurm writes to: with a backslash in a path it leaves %j as it is; sbatch(1)."""
    if "\\" in str(path):
        raise ValueError(f"{shown(str(path))} holds a backslash, which Slurm gives a meaning; choose another folder")
    return path


def number_as_text(value: object) -> object:
    """The text of a number, for fields where YAML's 60 and '60' mean the same."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def check_time(text: str) -> str:
    """Pass one of Slurm's six forms of a time."""
    time_s(text)
    return text


def check_memory(text: str) -> str:
    """Pass an amount of memory with its unit."""
    memory_mib(text)
    return text


def check_gpus(text: str) -> str:
    """Pass a number of GPUs, with or without their type."""
    num_gpus(text)
    return text


def check_nodes(value: object, check_number: ValidatorFunctionWrapHandler) -> object:
    """Pass text of the fewest and the most nodes; anything else has to be a number."""
    if isinstance(value, str) and re.fullmatch(r"[0-9]+ *- *[0-9]+", value):
        node_range(value)
        return value
    return check_number(value)


def check_flag_value(value: object) -> str | int | bool:
    """Pass the value of an sbatch flag: text, a whole number, or true for a flag without a value."""
    if value is False:
        raise ValueError("false gives no flag; leave it out (true gives a flag without a value)")
    if not isinstance(value, str | int):
        raise ValueError("expected text, a whole number, or true for a flag without a value; put it in quotes")
    return check_line(value) if isinstance(value, str) else value


def check_interpreter(text: str) -> str:
    """Pass the absolute path of an interpreter: a name would be another program on another machine."""
    check_expanded(check_line(text))
    if not text.startswith("/"):
        raise ValueError(f"{shown(text)} is no absolute path; write where the interpreter lies on the nodes")
    return text


def check_mount(text: str) -> str:
    """Pass a folder that a container sees: SRC, SRC:DST or SRC:DST:ro, absolute."""
    check_expanded(check_line(text))
    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    is_path = source.startswith("/") and (not rest or target.startswith("/"))
    if not is_path or mode not in ("", "ro", "rw") or "," in text:
        raise ValueError(
            f"{shown(text)} is no mount; write absolute folders, as /scratch, /here:/there or /here:/there:ro"
        )
    return text


def check_once(items: tuple[str, ...]) -> tuple[str, ...]:
    """Pass a list without repeats."""
    repeated = [item for number, item in enumerate(items) if item in items[:number]]
    if repeated:
        raise ValueError(f"{shown(repeated[0])} stands there twice")
    return items


Line = Annotated[str, AfterValidator(check_line)]
Expanded = Annotated[str, AfterValidator(check_line), AfterValidator(check_expanded)]
Word = Annotated[str, AfterValidator(check_word)]
ShellLine = Annotated[str, AfterValidator(check_shell_line)]
RunName = Annotated[str, AfterValidator(check_name)]
MailType = Annotated[str, AfterValidator(check_mail_type)]
AbsolutePath = Annotated[Path, BeforeValidator(absolute_path)]
LogFolder = Annotated[Path, BeforeValidator(absolute_path), AfterValidator(check_log_folder)]
_TEXT_OR_NUMBER = WithJsonSchema({"type": ["string", "integer"]})
Time = Annotated[str, BeforeValidator(number_as_text), AfterValidator(check_time), _TEXT_OR_NUMBER]
Memory = Annotated[str, BeforeValidator(number_as_text), AfterValidator(check_memory), _TEXT_OR_NUMBER]
Gpus = Annotated[str, BeforeValidator(number_as_text), AfterValidator(check_gpus), _TEXT_OR_NUMBER]
if TYPE_CHECKING:
    NodeCount = int | str
else:  # whatever is no range is held to be a number, and so are the messages about it
    NodeCount = Annotated[
        int,
        Field(ge=1, le=MAX_NODES),
        WrapValidator(check_nodes),
        WithJsonSchema(
            {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_NODES}, {"type": "string", "pattern": "-"}]}
        ),
    ]
Interpreter = Annotated[str, AfterValidator(check_interpreter)]
Mount = Annotated[str, AfterValidator(check_mount)]
FlagName = Annotated[str, AfterValidator(check_flag)]
FlagValue = Annotated[
    str | int | bool,
    PlainValidator(check_flag_value),
    WithJsonSchema({"anyOf": [{"type": ["string", "integer"]}, {"const": True}]}),
]
VariableName = Annotated[str, AfterValidator(check_variable)]
VariableValue = Annotated[str, AfterValidator(check_characters)]

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
