"""Memory over time while a checkpoint loads, layer by layer, as a picture."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # a file is wanted; no window, whatever the machine has

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from torch import Tensor
from torch.profiler import record_function

from olq.testing.memory import Mark, MemoryTrace

MB = 1e6


def marked(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Pass weights on; the time that the consumer spends with each becomes a mark of its name."""
    for name, tensor in weights:
        with record_function(name):
            yield name, tensor


def memory_plot(traces: dict[str, MemoryTrace], path: Path) -> None:
    """Write one panel a trace, same scales, decoder layers as bands, the peak as a line."""
    figure, axes = plt.subplots(len(traces), 1, figsize=(9, 2.9 * len(traces)), sharey=True, squeeze=False)
    for axis, (title, trace) in zip(axes[:, 0], traces.items(), strict=True):
        _panel(axis, title, trace)
    # Room above the highest peak, for the names of the layers.
    axes[0, 0].set_ylim(0, 1.35 * max(trace.peak_bytes for trace in traces.values()) / MB)
    axes[-1, 0].set_xlabel("milliseconds since the model's constructor was called")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _panel(axis: Axes, title: str, trace: MemoryTrace) -> None:
    end = 1e3 * max([mark.end_s for mark in trace.marks] + [*trace.times_s[-1:], 1e-3])
    times = [0.0, *(1e3 * t for t in trace.times_s), end]
    live = [0.0, *(b / MB for b in trace.live_bytes), trace.final_bytes / MB]
    axis.fill_between(times, live, step="post", alpha=0.35, linewidth=0, color="tab:blue")
    axis.step(times, live, where="post", linewidth=1, color="tab:blue")
    axis.axhline(trace.peak_bytes / MB, color="tab:red", linewidth=1, linestyle="--")
    axis.set_title(
        f"{title}: peak {trace.peak_bytes / MB:.2f} MB, then {trace.final_bytes / MB:.2f} MB", fontsize=10
    )
    axis.set_ylabel("live MB")
    axis.set_xlim(0, end)
    top = axis.get_xaxis_transform()
    for number, (label, marks) in enumerate(groupby(trace.marks, key=_layer)):
        spans = list(marks)
        first, last = 1e3 * spans[0].start_s, 1e3 * spans[-1].end_s
        axis.axvspan(first, last, color="0.88" if number % 2 else "0.95", zorder=0, linewidth=0)
        if last - first > 0.015 * end:
            axis.text(
                (first + last) / 2, 0.97, label, transform=top, ha="center", va="top", fontsize=7, rotation=90
            )


def _layer(mark: Mark) -> str:
    """`model.layers.3.mlp.up_proj.weight` belongs to `layer 3`, anything else to itself."""
    words = mark.name.split(".")
    return f"layer {words[2]}" if words[1:2] == ["layers"] else words[-2]
