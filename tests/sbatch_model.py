"""How sbatch reads the #SBATCH lines of a script; a model for tests, after what Slurm 22.05, 24.11 and 26.05 do.

They differ in one thing: escapes_blanks, whether a blank behind a backslash belongs to the word, as on 24.11 and 26.05.
"""

from collections.abc import Iterator


def words_of(line: str, *, escapes_blanks: bool = False) -> Iterator[str]:
    """The words of one line behind #SBATCH.

    Raises ValueError: a quote is left open, at which sbatch refuses the script.
    """
    word: str | None = None
    quote, is_escaped = "", False
    for character in line:
        if character.isspace() and not quote and not (is_escaped and escapes_blanks):
            if word is not None:
                yield word
            word, is_escaped = None, False
        elif is_escaped:
            word, is_escaped = (word or "") + character, False
        elif character == "\\":
            is_escaped = True
        elif quote:
            word, quote = ((word or ""), "") if character == quote else ((word or "") + character, quote)
        elif character in "'\"":
            quote, word = character, word or ""
        elif character == "#":
            break
        else:
            word = (word or "") + character
    if quote:
        raise ValueError(f"unmatched {quote} in {line}")
    if word is not None:
        yield word


def directives(script: str, *, escapes_blanks: bool = False) -> dict[str, str | bool]:
    """The options that a script asks for; those without a value are True.

    Raises ValueError: a word that is no long option.
    """
    found: dict[str, str | bool] = {}
    for line in script.splitlines():
        if line.startswith("#SBATCH"):
            for word in words_of(line.removeprefix("#SBATCH"), escapes_blanks=escapes_blanks):
                name, equals, value = word.partition("=")
                if not name.startswith("--"):
                    raise ValueError(f"{word!r} is no long option")
                found[name.removeprefix("--")] = value if equals else True
        elif line.strip() and not line.strip().startswith("#"):
            break
    return found
