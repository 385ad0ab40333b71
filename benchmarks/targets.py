"""What the benchmarks have to reach, and how their rows are read: the one list of both, as data.

A benchmark appends rows to `benchmarks/results/<name>.jsonl`. `BENCHMARKS` says what a row's figures are held
against and where its times and bytes are; `TARGETS` says how large, or how small, a figure has to be. Targets hold
on the GPU they were set for, `GPU`; a row of another one has none.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

GPU = "NVIDIA H200"


@dataclass(frozen=True)
class Figure:
    """One number of a row, as the page shows it.

    Args:
        key: where it stands in the row.
        label: what it is.
        times: keys of absolute times, each with the name of what took it.
        where: what a row has to hold for the figure to be read this way; a tuple lists values.
    """

    key: str
    label: str
    times: Mapping[str, str]
    where: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Benchmark:
    """One file of rows.

    Args:
        name: of the module and of the file of rows.
        title: heading.
        against: one sentence on what the figures are held against.
        cases: keys that tell one case from another.
        figures: see `Figure`.
        extra: keys of bytes taken beside the results, each with what it is.
    """

    name: str
    title: str
    against: str
    cases: tuple[str, ...]
    figures: tuple[Figure, ...]
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A bound of a figure: at least `bound`, or with `most` at most.

    Args:
        benchmark: name.
        figure: key.
        where: the case, as keys and values of a row.
        bound: the number.
        most: whether smaller is better.
    """

    benchmark: str
    figure: str
    where: Mapping[str, object]
    bound: float
    most: bool = False

    def met(self, value: float) -> bool:
        """Whether a figure reaches it."""
        return value <= self.bound if self.most else value >= self.bound


def holds(where: Mapping[str, object], row: Mapping[str, object]) -> bool:
    """Whether a row has these values; a tuple lists the values it may have."""
    return all(
        row.get(key) in value if isinstance(value, tuple) else row.get(key) == value
        for key, value in where.items()
    )


LARGE, SMALL, FEW, MANY = "28672x8192", "4096x4096", (1, 16), 4096
SHAPE = "8192x8192"

BENCHMARKS = (
    Benchmark(
        "quantize_gpu",
        "Quantization of weights",
        "The share is the least bytes of a case by its time, over the rate of a plain copy on the device in the "
        "same rounds; at 4096 x 4096, olq's time is held against that of the format's formula under torch.compile, "
        "launching included.",
        ("case", "shape"),
        (
            Figure("share", "share of a copy's rate", {"ms": ""}),
            Figure(
                "in_a_row_ratio",
                "times as fast as torch.compile, calls in a row",
                {"in_a_row_us": "", "in_a_row_compiled_us": "torch.compile"},
            ),
            Figure(
                "single_ratio",
                "times as fast as torch.compile, one call",
                {"single_us": "", "single_compiled_us": "torch.compile"},
            ),
        ),
        {"scratch_bytes": "scratch"},
    ),
    Benchmark(
        "activations_gpu",
        "Quantization of activations, and dummy weights",
        "The share is the least bytes of a case by its time, over the rate of a plain copy of x, both in CUDA "
        "graphs; dummy weights are held against `fill_` of as many bytes.",
        ("case", "shape"),
        (
            Figure(
                "share",
                "share of a copy's rate",
                {"gpu_us": "", "copy_us": "copy", "compiled_gpu_us": "torch.compile"},
            ),
            Figure("of_a_fill", "times a fill's time", {"gpu_us": "", "fill_us": "fill"}),
        ),
        {"scratch_bytes": "scratch"},
    ),
    Benchmark(
        "reload_gpu",
        "Reload of a model in place",
        "The limit is the time that the bytes which the case has to move take at the rate of a plain copy in the same "
        "rounds; the model has the linear layers of a Llama-3-8B shape, and a reload runs through the public API.",
        ("case", "layers"),
        (Figure("times_limit", "times the limit", {"ms": "", "first_ms": "first load"}),),
        {"extra_bytes": "beside the model"},
    ),
    Benchmark(
        "load_gpu",
        "Load from files",
        "The rate of `olq.load`, quantization included, over that of safetensors' own load of the same bfloat16 files "
        "onto the device; the files are in the page cache.",
        ("case", "layers"),
        (
            Figure(
                "times_load_file",
                "times as fast as load_file",
                {"seconds.olq load": "", "seconds.load_file": "load_file"},
            ),
            Figure(
                "times_safe_open",
                "times as fast as safe_open",
                {"seconds.olq load": "", "seconds.safe_open": "safe_open"},
            ),
        ),
        {"extra_device_bytes": "on the device, beside the model", "pinned_bytes": "page-locked"},
    ),
    Benchmark(
        "forward_gpu",
        "Layers with quantized weights and activations",
        "At M = 4096 the time of torch's bare scaled_mm on operands that are there, over that of the whole layer, "
        "which quantizes x as well; at M = 1 and 16 the time of moving the operands' bytes, at the rate of the row "
        "whose copies were fastest, over that of the product, and for information over that of the whole layer. "
        "Shares are medians over rounds, so that they may differ a little from those of the times beside them.",
        ("case", "m", "shape"),
        (
            Figure(
                "share",
                "share of the bare product, x quantized",
                {"layer_us": "", "bare_us": "bare"},
                {"m": MANY},
            ),
            Figure("share", "share of moving its bytes", {"product_us": "", "least_us": "bytes"}, {"m": FEW}),
            Figure(
                "share_of_layer",
                "share of moving its bytes, x quantized",
                {"layer_us": "", "least_us": "bytes"},
            ),
        ),
    ),
    Benchmark(
        "linear_gpu",
        "Products with quantized weights",
        "The share is the time of reading codes and scales at a copy's rate, over olq's; the speed is the time of a "
        "linear with a bfloat16 weight, over olq's. A copy that runs between products is slower at times, since they "
        "heat the GPU, and products of few rows are not slower then. So all rows are held against the row whose copies "
        "were fastest. Times of many rows differ by some 10 % from process to process.",
        ("case", "rows_of_x", "shape"),
        (
            Figure("share", "share of reading its bytes", {"us": ""}),
            Figure("speed", "times as fast as a bfloat16 linear", {"us": "", "linear_us": "bfloat16"}),
        ),
    ),
)


def _each(
    benchmark: str, figure: str, cases: Mapping[str, float], most: bool = False, **where: object
) -> tuple[Target, ...]:
    return tuple(
        Target(benchmark, figure, {"case": case, **where}, bound, most) for case, bound in cases.items()
    )


_QUANTIZE = {
    "fp8 channel": 0.90,
    "fp8 block": 0.90,
    "fp8 tensor": 0.85,
    "mxfp8": 0.90,
    "nvfp4, scale given": 0.75,
    "nvfp4": 0.70,
}
_SPEEDUP = dict.fromkeys(_QUANTIZE, 1.5)
_RELOAD = {"reload fp8": 1.3, "reload mxfp8": 1.4, "reload nvfp4": 1.4}
_FORWARD = ("tensor", "token", "block")
_READ = {"fp8 channel": 0.80, "mxfp8": 0.75, "nvfp4": 0.65}
_PRODUCT = {"fp8 channel": 0.85, "mxfp8": 0.85, "nvfp4": 0.85}

TARGETS = (
    *_each("quantize_gpu", "share", _QUANTIZE, shape=LARGE),
    *_each("quantize_gpu", "in_a_row_ratio", _SPEEDUP, shape=SMALL),
    *_each("quantize_gpu", "single_ratio", _SPEEDUP, shape=SMALL),
    *_each("activations_gpu", "of_a_fill", {"dummy torch.float8_e4m3fn": 1.3}, True, shape="16384x8192"),
    *_each("reload_gpu", "times_limit", _RELOAD, True, layers=32),
    *_each("load_gpu", "times_load_file", {"load fp8": 3.0}, layers=32),
    *_each("load_gpu", "times_safe_open", {"load fp8": 3.0}, layers=32),
    *(t for m in FEW for t in _each("forward_gpu", "share", dict.fromkeys(_FORWARD, 0.80), m=m, shape=SHAPE)),
    *_each("forward_gpu", "share", dict.fromkeys(_FORWARD, 0.92), m=MANY, shape=SHAPE),
    *(t for m in FEW for t in _each("linear_gpu", "share", _READ, rows_of_x=m, shape=SHAPE)),
    *_each("linear_gpu", "speed", _PRODUCT, rows_of_x=MANY, shape=SHAPE),
)
