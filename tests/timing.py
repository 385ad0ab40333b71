"""Stand-ins for clocks in tests of benchmarks."""

from collections import Counter
from collections.abc import Callable, Hashable


def cold_at_first(rounds: int, usual: Callable[[Hashable], float]) -> Callable[[Hashable], float]:
    """Times of what runs, of which those of the first rounds are not the usual ones: they must not count."""
    seen: Counter[Hashable] = Counter()

    def milliseconds(run: Hashable) -> float:
        seen[run] += 1
        return usual(run) if seen[run] > rounds else 1e9

    return milliseconds
