"""Frozen pydantic models whose constructor speaks in olq's own errors.

`Frozen` is the base of what a user configures: its fields can't be set again, keys that it does not know are
refused, and `Model(...)` raises `ConfigError`, with where, found, need and remedy, for all mistakes at once.
(What pydantic itself offers, `model_validate` and the like, goes on raising pydantic's `ValidationError`;
`explain` turns one into the other.) `FrozenDict` is what a dict in such a model becomes, so that the model is
frozen all the way down, hashable and equal after a trip through JSON.
"""

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from olq.errors import ConfigError, OlqError


class FrozenDict(dict[str, Any]):
    """A dict that refuses to change. Equal ones have equal hashes if their values can be hashed."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Independent of the order, as equality is."""
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy as a whole: the default would fill an empty one item by item."""
        return FrozenDict, (dict(self),)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the parameters of a configuration are frozen; make a new configuration instead")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse  # pyright: ignore


def freeze(value: object, where: str = "") -> Any:
    """Make a JSON value unchangeable: tuples for lists, `FrozenDict` for dicts, at every depth.

    Raises:
        ConfigError: something that JSON can't hold, non-finite numbers and keys that are no strings included.
    """
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return FrozenDict({key: freeze(item, f"{where}.{key}") for key, item in value.items()})
    if isinstance(value, list | tuple):
        return tuple(freeze(item, f"{where}[{i}]") for i, item in enumerate(value))
    finite = not isinstance(value, float) or math.isfinite(value)
    if (value is None or type(value) in (bool, int, float, str)) and finite:
        return value
    raise ConfigError(
        "A parameter can't be written to JSON.",
        where=where,
        found=short(value),
        need="a string, a finite number, true or false, null, or a list or table of these",
        remedy="give types and devices by name, for example 'bfloat16'",
    )


#: The type of a field that holds parameters which somebody else checks.
JsonDict = Annotated[dict[str, Any], AfterValidator(freeze)]


class _RaisesConfigError(type(BaseModel)):
    # Not an __init__ of the model: pydantic would call that for nested models as well, and their mistakes
    # would arrive as one lump instead of one by one.
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except ValidationError as error:
            raise explain(error, cls, where=f"{cls.__name__}.") from None  # pyright: ignore[reportArgumentType]


# Hidden from type checkers, which would stop to check arguments of a class whose metaclass has a __call__.
class Frozen(BaseModel, **({} if TYPE_CHECKING else {"metaclass": _RaisesConfigError})):
    """A frozen model that knows all its keys; its constructor raises `ConfigError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    #: Keys that are often put here by mistake, with what to do about it.
    misplaced: ClassVar[Mapping[str, str]] = {}


def explain(error: ValidationError, model: type[BaseModel], *, where: str) -> ConfigError:
    """Turn pydantic's error into one of olq's, with all mistakes in it.

    Args:
        error: what pydantic raised.
        model: the model that was to be made; its fields are what is allowed.
        where: what goes before a field's name, for example `"olq.toml: "`.
    """
    mistakes = [_mistake(item, model, where) for item in error.errors(include_url=False)]
    return combine(f"There are {len(mistakes)} mistakes in {model.__name__}.", mistakes)


def combine(problem: str, mistakes: Sequence[ConfigError]) -> ConfigError:
    """One error for all of them: a single one as it is, several numbered within each fact that differs."""
    if len(mistakes) == 1:
        return mistakes[0]
    facts: dict[str, str] = {}
    for fact in ("where", "found", "need", "remedy"):
        texts = [getattr(mistake, fact) for mistake in mistakes]
        numbered = "; ".join(f"({i}) {text}" for i, text in enumerate(texts, 1))
        facts[fact] = numbered if len(set(texts)) > 1 else texts[0]
    return ConfigError(problem, **facts)


def short(value: object, limit: int = 80) -> str:
    """The value's repr, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _mistake(item: Any, model: type[BaseModel], where: str) -> ConfigError:
    loc: Sequence[str | int] = item["loc"]
    at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    inner = item.get("ctx", {}).get("error")
    if isinstance(inner, OlqError):
        # Raised by a field's own check, which knows its place only below the field: '', '.key' or '[0]'.
        place = (where + at + inner.where).removesuffix(".")
        return ConfigError(
            inner.problem, where=place, found=inner.found, need=inner.need, remedy=inner.remedy
        )
    model, key = _model_at(model, loc[:-1]), loc[-1] if loc else ""
    names = ", ".join(repr(name) for name in model.model_fields) or "none: there are no parameters"
    if item["type"] == "extra_forbidden":
        return ConfigError(
            f"{model.__name__} has no field {key!r}.",
            where=where + at,
            found=f"{key} = {short(item['input'])}",
            need=f"one of {names}",
            remedy=_remedy_for_key(str(key), model),
        )
    if item["type"] == "missing":
        return ConfigError(
            f"{model.__name__} needs a field {key!r}.",
            where=where + at,
            found=f"only {', '.join(map(repr, item['input']))}" if item["input"] else "no field at all",
            need=f"a value for {key!r}",
            remedy=f"add {key!r}",
        )
    return ConfigError(
        f"{model.__name__} can't take this value.",
        where=where + at,
        found=short(item["input"]),
        need=item["msg"],
        remedy="give a value of that kind",
    )


def _remedy_for_key(key: str, model: type[BaseModel]) -> str:
    hints: Mapping[str, str] = getattr(model, "misplaced", {})
    if key in hints:
        return hints[key]
    near = difflib.get_close_matches(key, model.model_fields, n=1)
    return f"did you mean {near[0]!r}?" if near else "remove it"


def _model_at(model: type[BaseModel], loc: Sequence[str | int]) -> type[BaseModel]:
    """The innermost model on the way to a place."""
    for part in loc:
        field = model.model_fields.get(str(part))
        model = next(_models_in(field.annotation), model) if field else model
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
