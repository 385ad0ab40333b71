"""What olq raises: one class for each kind of mistake, each with a way out.

Every error says where it happened, what was found, what is needed and what to do about it. The four facts are
attributes as well as text, so that an adapter needs no text parsing. Each class also derives from the built-in that
a caller would expect.
"""


class OlqError(Exception):
    """Base class of everything olq raises on purpose.

    Args:
        problem: one sentence, without the facts.
        where: the tensor, layer, file or call.
        found: what was there.
        need: what has to be there.
        remedy: what the caller can do.
    """

    def __init__(self, problem: str, *, where: str, found: str, need: str, remedy: str) -> None:
        self.problem, self.where, self.found, self.need, self.remedy = problem, where, found, need, remedy
        super().__init__(
            f"{problem}\n  where:  {where}\n  found:  {found}\n  need:   {need}\n  remedy: {remedy}"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle by the facts: the default would call the class with the text alone."""
        return _rebuild, (type(self), self.problem, self.where, self.found, self.need, self.remedy)


def _rebuild(kind: type[OlqError], problem: str, where: str, found: str, need: str, remedy: str) -> OlqError:
    return kind(problem, where=where, found=found, need=need, remedy=remedy)


class ConfigError(OlqError, ValueError):
    """A configuration contradicts itself or the model."""


class UnknownNameError(OlqError, LookupError):
    """A name that nobody registered, or a tensor that no parameter takes."""


class LayoutError(OlqError, ValueError):
    """A shape, dtype, stride or tag does not fit what a method or a layout needs."""


class SourceError(OlqError, ValueError):
    """A fed tensor or a file can't be what it is taken for: shape, dtype, already quantized, truncated."""


class NonFiniteError(OlqError, ValueError):
    """A weight holds inf or NaN, and the method's policy is to refuse it."""


class CoverageError(OlqError, RuntimeError):
    """Elements that never arrived, or arrived twice."""


class LoaderError(OlqError, RuntimeError):
    """A weight loader did something that can't be served without guessing."""


class StateError(OlqError, RuntimeError):
    """A call that is not legal now: a forward on half-loaded weights, a feed outside a session."""
