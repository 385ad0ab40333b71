"""Which layer gets which method, and why: pure strings, no model and no method is touched.

For each layer, in this order
1. `keep` leaves it in high precision. A rule that matches the same layer and says otherwise is an error, not
   a matter of precedence. (For an exception inside an exception, write the inner one as an earlier rule.)
2. The first rule that matches decides.
3. Otherwise the configuration's own method.

A fused layer has two spellings: its own name and those of its parts (`qkv_proj`, or `q_proj`, `k_proj` and
`v_proj` in its place). A pattern may use either. One that takes in some of the parts asks for a cut that
can't be made, and is an error.

Nothing gets lost: every decision carries its reason, and `finish` refuses patterns that decided nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from olq import patterns
from olq.config import KEEP, QuantConfig
from olq.errors import ConfigError
from olq.frozen import FrozenDict, combine

_NOTHING = FrozenDict()
_DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one layer.

    Args:
        layer: its name.
        method: name of the method; `keep` leaves the layer in high precision.
        params: parameters of the method.
        reason: the entry of the configuration that decided, in words.
        parts: names of the parts of a fused layer.
    """

    layer: str
    method: str
    params: Mapping[str, Any]
    reason: str
    parts: tuple[str, ...] = ()


@dataclass(slots=True)
class _Entry:
    """One pattern of the configuration, and what became of it."""

    where: str
    pattern: patterns.Pattern
    method: str | None
    params: Mapping[str, Any]
    decided: bool = False
    #: Earlier rules that took a layer which this one matches as well.
    takers: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        if self.where == _DEFAULT:
            return _DEFAULT
        return f"{self.where.removesuffix('.match')} {self.pattern.text!r}"


@dataclass(frozen=True, slots=True)
class _Hit:
    """An entry matches a layer or one of its parts, at this path: the layer, the part or an ancestor."""

    entry: _Entry
    path: str


class Resolver:
    """Decides layer by layer and keeps the account.

    Args:
        config: what the user asks for.

    Attributes:
        decisions: in the order of the calls.
    """

    def __init__(self, config: QuantConfig) -> None:
        self._keep = [_entry(f"keep[{i}]", text) for i, text in enumerate(config.keep)]
        self._rules = [
            _entry(f"rules[{i}].match", rule.match, rule.method, rule.params)
            for i, rule in enumerate(config.rules)
        ]
        self._default = _entry(_DEFAULT, "**", config.method, config.params)
        self._layers: dict[str, Decision] = {}
        self._paths: set[str] = set()
        self._unquantized: set[str] = set()

    @property
    def decisions(self) -> list[Decision]:
        """All decisions so far, in order."""
        return list(self._layers.values())

    def decide(self, name: str, part_names: Sequence[str] = ()) -> Decision:
        """Decide about a layer. Asking again gives the same answer and counts once.

        Args:
            name: the layer's full name, in the spelling that the user knows.
            part_names: for a fused layer, the names that its parts have beside it, in order.

        Raises:
            ConfigError: `keep` and a rule contradict each other; parts of the layer got different decisions,
                or would get them in an engine that does not fuse; the layer was decided with other parts.
        """
        parts = tuple(part_names)
        if name in self._layers:
            return _same_again(self._layers[name], parts)
        parent = name.rpartition(".")[0]
        siblings = [f"{parent}.{part}" if parent else part for part in parts]
        hits = [self._hit(name, path) for path in siblings or [name]]
        self._paths.update(siblings, (name,))
        first = hits[0].entry
        if any((hit.entry.method, hit.entry.params) != (first.method, first.params) for hit in hits):
            raise ConfigError(
                "The parts of a fused layer can't be treated differently.",
                where=f"layer {name}",
                found="; ".join(
                    f"{part} gets {_wish(hit.entry)} by {hit.entry}"
                    for part, hit in zip(parts, hits, strict=True)
                ),
                need="one method with the same parameters for all parts, because they are one tensor",
                remedy=f"match the fused name {name.rpartition('.')[2]!r}, or all of its parts alike",
            )
        _refuse_half_matches(hits, name, siblings)
        reason = self._reason(name, parts, hits)
        self._layers[name] = Decision(name, first.method or KEEP, first.params, reason, parts)
        return self._layers[name]

    def see(self, names: Iterable[str]) -> None:
        """Tell of modules that exist and are never quantized (norms, embeddings).

        A `keep` pattern for one of them is fulfilled. A rule that matches nothing else stays an error. Modules
        with decided layers inside may be among them and count for nothing: `re:model` means no layer below.
        """
        self._unquantized.update(names)

    def finish(self) -> None:
        """Call when all layers are decided: refuse the patterns that decided nothing.

        Raises:
            ConfigError: a pattern matches no layer (with what may have been meant), or earlier rules took all
                layers that a rule matches. All of them in one error.
        """
        mistakes = []
        for entry in (*self._keep, *self._rules):
            if not entry.decided:
                mistakes.append(_shadowed(entry) if entry.takers else self._unmatched(entry))
        mistakes = [mistake for mistake in mistakes if mistake]
        if mistakes:
            raise combine("The configuration does not fit the model.", mistakes)

    def table(self) -> str:
        """All decisions as text, one line a layer, and how many layers each method has."""
        rows = [("layer", "method", "parameters", "reason")]
        for made in self._layers.values():
            rows.append((made.layer, made.method, _text(made.params) or "-", made.reason))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        counts = Counter(made.method for made in self._layers.values())
        total = ", ".join(f"{count} {method}" for method, count in counts.most_common()) or "none"
        return "\n".join([*lines, f"layers: {total}"])

    def _hit(self, name: str, path: str) -> _Hit:
        """What decides about a layer, or about the part of it whose own name is `path`."""
        kept = _hits(self._keep, name, path)
        ruled = _hits(self._rules, name, path)
        if kept and ruled and ruled[0].entry.method is not None:
            raise ConfigError(
                "`keep` and a rule contradict each other.",
                where=f"layer {path}",
                found=f"{kept[0].entry} and {ruled[0].entry} (method {ruled[0].entry.method!r}) both match",
                need="one of them, because neither goes before the other",
                remedy=f"narrow one, or write the kept pattern as an earlier rule with method {KEEP!r}",
            )
        for hit in (*kept, *ruled[:1]):
            hit.entry.decided = True
        for hit in ruled[1:]:
            hit.entry.takers.add(str(ruled[0].entry))
        return (*kept, *ruled, _Hit(self._default, name))[0]

    def _reason(self, name: str, parts: Sequence[str], hits: Sequence[_Hit]) -> str:
        """The entries that decided, each once, with what they match of the layer."""
        matched: dict[str, list[str]] = {}
        for part, hit in zip(parts or [name], hits, strict=True):
            if hit.entry is self._default:
                text = f"{_DEFAULT}: no pattern matches"
            elif hit.path == name:
                text = f"{hit.entry} matches the name"
            elif name.startswith(hit.path + "."):
                text = f"{hit.entry} matches {hit.path}"
            else:
                text = f"{hit.entry} matches "
            matched.setdefault(text, []).extend([part] if text.endswith(" ") else [])
        return "; ".join(text + ", ".join(some) for text, some in matched.items())

    def _unmatched(self, entry: _Entry) -> ConfigError | None:
        around = {end for path in self._paths for end in patterns.prefixes(path)}
        leaves = self._unquantized - around
        elsewhere = [name for name in sorted(leaves) if entry.pattern.match(name) is not None]
        if elsewhere and entry.method is None:
            return None
        if elsewhere:
            return ConfigError(
                "A rule matches only modules that are never quantized.",
                where=entry.where,
                found=f"{entry.pattern.text!r} matches {', '.join(map(repr, elsewhere[:3]))}",
                need="a pattern of at least one layer with a weight to quantize",
                remedy="remove the rule",
            )
        known = self._paths | leaves if entry.method is None else self._paths
        return ConfigError(
            "A pattern matches no layer.",
            where=entry.where,
            found=f"{entry.pattern.text!r} against the names of {len(self._layers)} layers",
            need="at least one layer for each pattern, so that no wish is lost in silence",
            remedy=f"{patterns.suggest(entry.pattern, known)}; or remove the entry",
        )


def _entry(where: str, text: str, method: str = KEEP, params: Mapping[str, Any] = _NOTHING) -> _Entry:
    return _Entry(where, patterns.parse(text, where=where), None if method == KEEP else method, params)


def _hits(entries: Sequence[_Entry], name: str, path: str) -> list[_Hit]:
    """The entries that match the layer's own name or a part's, in order."""
    ends = [(entry, entry.pattern.match(name) or entry.pattern.match(path)) for entry in entries]
    return [_Hit(entry, end) for entry, end in ends if end is not None]


def _text(params: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in params.items())


def _wish(entry: _Entry) -> str:
    return f"{entry.method or KEEP}({_text(entry.params)})" if entry.params else entry.method or KEEP


def _refuse_half_matches(hits: Sequence[_Hit], name: str, siblings: Sequence[str]) -> None:
    """`*v_proj` also matches `qkv_proj`: where layers are not fused it would take v alone."""
    for hit in hits:
        taken = [path for path in siblings if hit.entry.pattern.match(path) is not None]
        if hit.path == name and 0 < len(taken) < len(siblings):
            raise ConfigError(
                "A pattern matches a fused layer's name and only some of its parts.",
                where=f"layer {name}",
                found=f"{hit.entry} matches it and {', '.join(taken)}, not all of {', '.join(siblings)}",
                need="the same decision whether an engine fuses these layers or not",
                remedy="write the fused name in full, or a pattern that matches each part",
            )


def _same_again(made: Decision, parts: tuple[str, ...]) -> Decision:
    if made.parts != parts:
        raise ConfigError(
            "A layer is decided twice, with different parts.",
            where=f"layer {made.layer}",
            found=f"parts {made.parts}, then {parts}",
            need="one answer for one layer",
            remedy="give each layer a name of its own",
        )
    return made


def _shadowed(rule: _Entry) -> ConfigError:
    return ConfigError(
        "A rule never decides.",
        where=rule.where,
        found=f"all layers that {rule.pattern.text!r} matches were taken by {', '.join(sorted(rule.takers))}",
        need="rules from the special to the general, because the first that matches decides",
        remedy="move it before them, or remove it",
    )
