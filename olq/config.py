"""What a user asks for: a method, rules by layer name, and what stays in high precision.

A `QuantConfig` is frozen, hashable and plain data: it goes to JSON and back unchanged, and it is read from
JSON or TOML. A key that it does not know, a value of the wrong kind, a pattern that can't be read and a
contradiction are errors when it is made, all of them in one message. Whether the patterns fit a model is
found in olq.rules; whether a method exists and takes the parameters, in olq.registry and by the method.

No torch here: a configuration can be checked where no model is.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from olq import patterns
from olq.errors import ConfigError
from olq.frozen import Frozen, FrozenDict, JsonDict, explain, short

#: The method that leaves a layer in high precision. A rule may name it like any other.
KEEP = "keep"


def _list(value: object) -> object:
    """Refuse what pydantic would turn into a tuple in no particular order, and a lone pattern."""
    if isinstance(value, list | tuple):
        return value
    raise ConfigError(
        "A list is needed here.",
        where="",
        found=short(value),
        need="a list, also for one entry",
        remedy=f"write [{value!r}]" if isinstance(value, str) else "write a list; its order counts",
    )


def _name(value: str) -> str:
    if value and value.isprintable() and not any(map(str.isspace, value)):
        return value
    raise ConfigError(
        "The name of a method is empty or holds white space.",
        where="",
        found=repr(value),
        need="a registered name, for example 'fp8'",
        remedy=f"for layers that stay in high precision write {KEEP!r}",
    )


MethodName = Annotated[str, AfterValidator(_name)]
PatternText = Annotated[str, AfterValidator(lambda text: patterns.parse(text, where="").text)]


class Rule(Frozen):
    """Which layers get another method than the default one.

    Args:
        match: a pattern, see `olq.patterns`.
        method: name of the method for the layers that match; `"keep"` leaves them in high precision.
        params: parameters of that method. Nothing is inherited from the configuration's own.
    """

    match: PatternText
    method: MethodName
    params: JsonDict = Field(default_factory=FrozenDict)

    misplaced: ClassVar[Mapping[str, str]] = {
        key: f"{key!r} belongs to the whole configuration; in TOML it has to stand above the first [[rules]]"
        for key in ("keep", "rules")
    }


class QuantConfig(Frozen):
    """Methods for the layers of a model.

    Args:
        method: name of the method of layers that no rule and no `keep` pattern matches. With `"keep"` the
            rules are a list of the only layers that are quantized.
        params: parameters of that method.
        rules: in order; the first that matches a layer decides.
        keep: patterns of layers that stay in high precision. A layer that a rule matches as well is an error.

    Raises:
        ConfigError: for everything that is wrong, at once. `where` names the fields: `rules[0].match`.
    """

    method: MethodName = "fp8"
    params: JsonDict = Field(default_factory=FrozenDict)
    # Tuples; declared as sequences so that type checkers take a list as well.
    rules: Annotated[Sequence[Rule], BeforeValidator(_list), AfterValidator(tuple)] = ()
    keep: Annotated[Sequence[PatternText], BeforeValidator(_list), AfterValidator(tuple)] = ()

    @model_validator(mode="after")
    def _no_pattern_twice(self) -> Self:
        entries = [(f"keep[{i}]", text) for i, text in enumerate(self.keep)]
        entries += [(f"rules[{i}].match", rule.match) for i, rule in enumerate(self.rules)]
        first: dict[str, str] = {}
        for where, text in entries:
            if text in first:
                raise ConfigError(
                    "A pattern is listed twice.",
                    where=f"{first[text]} and {where}",
                    found=repr(text),
                    need="each pattern once, because a layer gets one decision",
                    remedy="remove the one that you don't mean",
                )
            first[text] = where
        return self

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str = "configuration") -> Self:
        """Check a mapping, as it comes from JSON or TOML.

        Args:
            data: field names to values.
            where: where the mapping comes from, for messages.

        Raises:
            ConfigError: for everything that is wrong, at once.
        """
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise ConfigError(
                "A configuration is a table of named fields.",
                where=where,
                found=short(data),
                need=f"a mapping from names to values: {', '.join(cls.model_fields)}",
                remedy='write, for example, {"method": "fp8", "keep": ["lm_head"]}',
            )
        try:
            return cls.model_validate(dict(data))
        except ValidationError as error:
            raise explain(error, cls, where=f"{where}: ") from None

    @classmethod
    def from_json(cls, text: str, *, where: str = "JSON text") -> Self:
        """Read a JSON object. A key that stands twice in one object is an error.

        Args:
            text: as `model_dump_json()` writes it, or by hand; absent fields get their defaults.
            where: where the text comes from, for messages.

        Raises:
            ConfigError: it is no JSON, or its content is wrong.
        """
        try:
            data = json.loads(text, object_pairs_hook=lambda pairs: _once(pairs, where))
        except (json.JSONDecodeError, RecursionError) as error:
            raise _unreadable(where, "JSON", error) from error
        return cls.from_dict(data, where=where)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a `.json` or `.toml` file, UTF-8.

        Raises:
            ConfigError: the file can't be read, is of another kind, or its content is wrong.
        """
        path = Path(path)
        if path.suffix not in (".json", ".toml"):
            raise ConfigError(
                "The kind of a configuration file is told by its suffix.",
                where=str(path),
                found=f"the suffix {path.suffix!r}",
                need="'.json' or '.toml'",
                remedy="rename the file, or parse it and call QuantConfig.from_dict",
            )
        try:
            text = path.read_text(encoding="utf-8-sig")  # editors on some systems put a byte order mark
            if path.suffix == ".json":
                return cls.from_json(text, where=str(path))
            data = tomllib.loads(text)
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise _unreadable(str(path), path.suffix[1:].upper(), error) from error
        return cls.from_dict(data, where=str(path))


def _once(pairs: Iterable[tuple[str, Any]], where: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ConfigError(
                "A key stands twice in one JSON object.",
                where=where,
                found=f"{key!r} with {short(out[key])} and with {short(value)}",
                need="each key once",
                remedy="remove the one that you don't mean",
            )
        out[key] = value
    return out


def _unreadable(where: str, kind: str, error: Exception) -> ConfigError:
    if isinstance(error, OSError):
        found, need, remedy = f"{type(error).__name__}: {error.strerror}", "a readable file", "check the path"
    else:
        found, need, remedy = f"{error}", f"valid {kind} in UTF-8", "correct the place that is named above"
    return ConfigError(
        f"A configuration can't be read as {kind}.", where=where, found=found, need=need, remedy=remedy
    )
