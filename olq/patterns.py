"""The pattern language of rules and `keep`: which layers a piece of text means.

Path      a layer's name, components joined by dots: `model.layers.3.mlp.down_proj`.
Glob      components joined by dots. `*` stands for any characters inside one component, `**` as a whole
          component for any number of components, also none. A glob matches a layer when its components match
          a run of neighbouring, whole components of the path. The run may start anywhere and ends at the
          layer or at one of its ancestors: `mlp` takes everything below a module of that name, and
          `layers.1` never takes `layers.10`.
Regular   `re:` and a regular expression that has to match the whole path; nothing is implied around it.

Strings in, strings out: no tensor and no model. Who wins when several patterns match is told in olq.rules.
"""

import difflib
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from olq.errors import ConfigError

#: Characters that mean something in a regular expression or a shell's glob and nothing here. A module whose
#: name really holds one is reached with `re:`.
_FOREIGN = frozenset("?[]{}()^$|+\\/ \t\r\n")
_NUMBER = re.compile(r"\d+")
_ANY_COMPONENTS = r"(?:[^.]+\.)*"
_NEED = "whole components joined by dots (`*` inside one, `**` for any number), or `re:` and an expression"


@dataclass(frozen=True, slots=True)
class Pattern:
    """One pattern, checked and compiled.

    Args:
        text: as the user wrote it.
        components: a glob's components; empty for a regular expression.
        regex: for a glob, it matches the path up to the end of the run, with a dot after each component.
        anywhere: for a glob, it matches the whole path; most paths are refused by it, in one step.
    """

    text: str
    components: tuple[str, ...]
    regex: re.Pattern[str]
    anywhere: re.Pattern[str] | None = None

    def match(self, path: str) -> str | None:
        """The layer or ancestor at which the match ends, the longest of several; None without a match."""
        if self.anywhere is None:
            return path if self.regex.fullmatch(path) else None
        if not self.anywhere.fullmatch(path + "." if path else ""):
            return None
        for end in prefixes(path):
            if self.regex.fullmatch(end + "." if end else ""):
                return end
        return None


def parse(text: str, *, where: str = "pattern") -> Pattern:
    """Check and compile a pattern.

    Args:
        text: a glob, or `re:` and a regular expression.
        where: the place of the pattern in the configuration, for messages.

    Raises:
        ConfigError: the text is empty, has an empty component, a `**` beside other characters, a character
            that no glob has, or an expression that does not compile.
    """
    if text.startswith("re:"):
        return Pattern(text, (), _compile(text, where))
    components = tuple(text.split("."))
    found, remedy = "", ""
    if not text:
        found, remedy = "''", "name a layer or a module, or remove the entry"
    elif foreign := sorted(_FOREIGN.intersection(text)):
        found = f"{text!r}, which holds {', '.join(map(repr, foreign))}"
        remedy = f"for a regular expression write {'re:' + text!r}; else remove the character"
    elif "" in components:
        found, remedy = (
            f"{text!r}, with nothing on one side of a dot",
            "remove the dot, or write `*` beside it",
        )
    elif any("**" in c and c != "**" for c in components):
        found, remedy = f"{text!r}, with `**` inside a component", "write `*` there, or a dot beside the `**`"
    if remedy:
        raise ConfigError("A pattern can't be read.", where=where, found=found, need=_NEED, remedy=remedy)
    body = "".join(_ANY_COMPONENTS if c == "**" else _component(c) for c in components)
    run = _ANY_COMPONENTS + body
    return Pattern(text, components, re.compile(run), re.compile(run + _ANY_COMPONENTS))


def suggest(pattern: Pattern, paths: Iterable[str], *, limit: int = 3) -> str:
    """What to write instead of a pattern that matches none of `paths`, as the text of a remedy.

    A changed pattern is offered only if it matches; otherwise the paths that look most like it.
    """
    names = sorted(set(paths))
    if not pattern.components:
        hits = [n for n in names if pattern.regex.search(n)]
        if hits:
            return (
                f"the expression has to match the whole name and is found inside {hits[0]!r}: "
                f"did you mean {'re:.*' + pattern.regex.pattern + '.*'!r}?"
            )
    for variants in _variants(pattern, names):
        fitting = [v.text for v in variants if any(v.match(name) is not None for name in names)]
        if fitting:
            return f"did you mean {' or '.join(map(repr, fitting[:limit]))}?"
    text = pattern.text if pattern.components else pattern.regex.pattern
    one_each = list({_NUMBER.sub("0", name): name for name in reversed(names)}.values())[::-1]
    near = difflib.get_close_matches(text, one_each, n=limit, cutoff=0.5) or one_each[:limit]
    return f"names there are, for example: {', '.join(map(repr, near))}" if near else "no layer was looked at"


def prefixes(path: str) -> Iterator[str]:
    """The path, its parent, and so on."""
    while True:
        yield path
        if "." not in path:
            return
        path = path.rpartition(".")[0]


def join(path: str, name: str) -> str:
    """The full name of what is called `name` in the module at `path`, "" for the model itself."""
    return f"{path}.{name}" if path else name


def _component(glob: str) -> str:
    return r"[^.]*".join(map(re.escape, glob.split("*"))) + r"\."


def _compile(text: str, where: str) -> re.Pattern[str]:
    expression = text.removeprefix("re:")
    if not expression:
        raise ConfigError(
            "A pattern can't be read.",
            where=where,
            found="'re:' with nothing behind it",
            need=_NEED,
            remedy="write the expression, or remove the entry",
        )
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(
            "A regular expression does not compile.",
            where=where,
            found=f"{text!r}: {error}",
            need="an expression that Python's re module accepts",
            remedy="correct it, or write a glob without `re:`",
        ) from error


def _variants(pattern: Pattern, names: list[str]) -> Iterator[list[Pattern]]:
    """Globs that a person may have meant, the best first: spellings corrected, then an end cut off."""
    if not pattern.components:
        return
    words = sorted({word for name in names for word in name.split(".") if word})
    choices = [
        [component] if "*" in component or component in words else difflib.get_close_matches(component, words)
        for component in pattern.components
    ]
    chosen = itertools.islice(itertools.product(*choices), 9)
    yield [parse(".".join(some)) for some in chosen if some != pattern.components]
    for rest in (pattern.components[1:], pattern.components[:-1]):
        if any(component.strip("*") for component in rest):
            yield [parse(".".join(rest))]
