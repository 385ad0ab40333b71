"""Which parameters a partial load covers: all of them, or those that some patterns match.

A pattern matches a parameter by its own name or by a module that it is in, as in `olq.patterns`. What is one parameter
under several names, or was one before it was untied, is covered as a whole or not at all.
"""

from collections.abc import Iterable, Sequence

from olq import patterns
from olq.errors import ConfigError


class Scope:
    """The names that a load covers.

    Args:
        texts: patterns; None covers everything.

    Raises:
        ConfigError: a pattern can't be read.
    """

    def __init__(self, texts: Sequence[str] | None = None) -> None:
        self.partial = texts is not None
        if isinstance(texts, str):
            texts = [texts]
        self._patterns = [patterns.parse(text, where="scope") for text in texts or ()]
        self._covered: set[str] = set()

    def choose(
        self, weights: Sequence[str], plain: Iterable[Sequence[str]], ties: Iterable[tuple[str, str]]
    ) -> None:
        """Decide for all names of a model.

        Args:
            weights: names of quantized weights.
            plain: names of each other parameter or buffer, all that it has.
            ties: pairs of names that take one arrival.

        Raises:
            ConfigError: a pattern matches none of the names.
        """
        if not self.partial:
            return
        groups = [set(names) for names in (*([name] for name in weights), *plain)]
        for one, other in ties:
            joined = [group for group in groups if one in group or other in group]
            groups = [group for group in groups if group not in joined]
            groups.append(set().union(*joined))
        everything = {name for group in groups for name in group}
        idle = [p for p in self._patterns if not any(p.match(name) is not None for name in everything)]
        if idle or not self._patterns:
            raise ConfigError(
                "The scope of a partial load matches nothing.",
                where="scope",
                found=", ".join(repr(p.text) for p in idle) or "no pattern at all",
                need="patterns that match parameters or modules of the model",
                remedy=patterns.suggest(idle[0], everything)
                if idle
                else "leave `scope` out to load everything",
            )
        for group in groups:
            if any(p.match(name) is not None for p in self._patterns for name in group):
                self._covered |= group

    def covers(self, name: str) -> bool:
        """Whether the load takes this parameter."""
        return not self.partial or name in self._covered
