"""One row of the table: load a checkpoint with one method and measure what it costs."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.engine import Llama, generate, load_model, load_plain, perplexity
from olq import QuantConfig
from olq.testing.memory import measure_memory

#: Told (share done from 0 to 1) while a stage runs.
Progress = Callable[[float], None]


@dataclass(frozen=True)
class Row:
    """What one method costs.

    Args:
        name: of the method and its parameters.
        bits: stored bits for an element of the quantized weights, scales and padding included; 16 without.
        weight_bytes: of all parameters of the loaded model, embedding and norms included.
        peak_bytes: the most that the allocator had given out at a time while the model was built and loaded.
        load_s: seconds of that, profiler included.
        perplexity: on the held-out text.
        tokens_per_s: greedy generation, one sequence.
    """

    name: str
    bits: float
    weight_bytes: int
    peak_bytes: int
    load_s: float
    perplexity: float
    tokens_per_s: float


@dataclass(frozen=True)
class Work:
    """What each model is measured on.

    Args:
        text: held-out token ids for the perplexity.
        prompt: token ids to generate from.
        new_tokens: how many are generated, the same for all; 2 or more.
        stage: called with (what begins, share of the row's time); returns where to report its progress.
    """

    text: Sequence[int]
    prompt: Sequence[int]
    new_tokens: int
    stage: Callable[[str, float], Progress]


def measure(
    name: str,
    quant: QuantConfig | None,
    folder: Path,
    work: Work,
) -> tuple[Row, Llama]:
    """Load `folder` by `quant`, measure, and hand the model on.

    Args:
        name: of the row.
        quant: the method; None loads without olq, in high precision.
        folder: checkpoint.
        work: what it is measured on.
    """
    report_load = work.stage(f"{name}: loading", 0.2)
    start = time.perf_counter()

    def progress(done: int, total: int | None, _: str) -> None:
        report_load(done / total if total else 0.0)

    def load() -> tuple[Llama, float]:
        if quant is None:
            return load_plain(folder), 16.0
        model, report = load_model(folder, quant, progress=progress)
        return model, report.bits_per_element

    trace = measure_memory(load)
    load_s = time.perf_counter() - start
    model, bits = trace.result

    report_text = work.stage(f"{name}: perplexity", 0.5)
    found = perplexity(model, work.text, progress=lambda done, total: report_text(done / total))

    report_tokens = work.stage(f"{name}: generating", 0.3)
    start, count = time.perf_counter(), 0
    for count, _ in enumerate(generate(model, work.prompt, max_new_tokens=work.new_tokens), 1):
        report_tokens(count / work.new_tokens)
    tokens_per_s = count / (time.perf_counter() - start)
    row = Row(
        name,
        bits=bits,
        weight_bytes=sum(p.nbytes for p in model.parameters()),
        peak_bytes=trace.peak_bytes,
        load_s=load_s,
        perplexity=found,
        tokens_per_s=tokens_per_s,
    )
    return row, model


def table(rows: Sequence[Row]) -> str:
    """The rows as text; peaks and perplexities against the first row."""
    base = rows[0]
    heads = [
        ("", "method"),
        ("bits an", "element"),
        ("bytes of", "weights"),
        ("peak bytes", "loading"),
        ("against", "bf16"),
        ("", "perplexity"),
        ("", "change"),
        ("tokens", "a second"),
    ]
    cells = [
        (
            row.name,
            f"{row.bits:.2f}",
            f"{row.weight_bytes:,}",
            f"{row.peak_bytes:,}",
            f"{row.peak_bytes / base.peak_bytes:.0%}",
            f"{row.perplexity:.3f}",
            f"{row.perplexity / base.perplexity - 1:+.2%}" if row is not base else "",
            f"{row.tokens_per_s:.1f}",
        )
        for row in rows
    ]
    lines = [tuple(head[i] for head in heads) for i in (0, 1)] + cells
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    text.insert(2, "-" * len(text[0]))
    return "\n".join(text)
