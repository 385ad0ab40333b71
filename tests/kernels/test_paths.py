"""Which way a call goes can be asked, and is never decided in silence. No GPU and no triton needed."""

import subprocess
import sys

import pytest
import torch

from numerics.cases import poison
from olq import kernels
from olq.kernels import launching, plans, tiles
from olq.kernels.shapes import GRID


def meta(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def fp8(n: int, k: int, block: tuple[int, int], source: torch.Tensor | None = None):
    grid = [-(-extent // b) if b else 1 for extent, b in zip((n, k), block, strict=True)]
    w = meta(n, k) if source is None else source
    codes = meta(*w.shape, dtype=torch.uint8)
    return w, codes, meta(*w.shape[:-2], *grid, dtype=torch.float32), *block, False


UNITS = {
    (1, 0): "fp8.quantize_rows",
    (0, 0): "tensor.amax_partials, tensor.quantize_tensor",
    (128, 128): "fp8.quantize_blocks",
    (3, 50): "fp8.quantize_blocks",
    (1, 128): "fp8.quantize_groups",
    (1, 48): "fp8.quantize_blocks",
}


@pytest.mark.parametrize(("block", "names"), UNITS.items(), ids=str)
def test_a_unit_has_its_kernel(block, names):
    plan = plans.plan("quantize_fp8_", fp8(300, 1000, block))
    assert not isinstance(plan, str)
    assert ", ".join(launch.kernel for launch in plan.launches) == names


def experts_that_do_not_merge() -> torch.Tensor:
    return meta(4, 6, 8, 32)[::2, ::2]


REFUSED = {
    "a unit of 300 x 7 is neither a row, nor the whole matrix, nor fits in one program": (
        lambda: plans.plan("quantize_fp8_", fp8(300, 1000, (0, 128)))
    ),
    "there are no elements": lambda: plans.plan("quantize_fp8_", fp8(0, 32, (1, 0))),
    "the leading dimensions of its tensors can't be seen as one": (
        lambda: plans.plan("quantize_fp8_", fp8(8, 32, (1, 0), experts_that_do_not_merge()))
    ),
    f"there are {GRID + 1} matrices, more than {GRID}": (
        lambda: plans.plan("quantize_fp8_", fp8(1, 32, (1, 0), meta(GRID + 1, 1, 32)))
    ),
    f"a column is more than {GRID} units long": (
        lambda: plans.plan("quantize_fp8_", fp8(2 * GRID + 2, 32, (2, 24)))
    ),
    "no kernel is written for it": lambda: plans.plan("another", ()),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_has_no_kernel_says_why(reason):
    assert REFUSED[reason]() == reason.replace("300 x 7", "300 x 128")


def test_a_call_on_a_cpu_goes_to_the_reference_and_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    args = (torch.zeros(2, 32), poison(2, 32), torch.zeros(2, 1), 1, 0, False)
    path = kernels.path("quantize_fp8_", *args)
    assert path.kernels == ()
    assert path.reason in ("the tensors are on cpu", "triton is not installed")
    assert str(path) == f"quantize_fp8_: olq.numerics, because {path.reason}"
    assert not kernels.launch("quantize_fp8_", args)
    assert not kernels.replay("quantize_fp8_", args)
    assert args[1].eq(0xA5).all()


def test_without_triton_the_reason_is_that(monkeypatch):
    monkeypatch.setattr(launching.importlib.util, "find_spec", lambda name: None)
    path = kernels.path("quantize_fp8_", torch.zeros(2, 32), poison(2, 32), torch.zeros(2, 1), 1, 0, False)
    assert path.reason == "triton is not installed"


def test_tensors_on_two_devices_go_to_the_reference():
    found = launching.unavailable((torch.zeros(2), meta(2)))
    assert found in ("the tensors are on cpu and meta", "triton is not installed")


def test_the_table_names_every_kernel():
    text = kernels.table()
    kernel_names = {
        launch.kernel
        for block in UNITS
        for launch in plans.plan("quantize_fp8_", fp8(300, 1000, block)).launches  # pyright: ignore
    }
    for name in kernel_names | {
        "tensor_once.clear, tensor_once.quantize_tensor",
        "blockscaled.quantize_mxfp8",
        "tensor.nvfp4_scale",
        "decode.dequantize_nvfp4",
    }:
        assert name in text
    assert "any other unit" in text
    assert len(text.splitlines()) == len(plans.TABLE)


@pytest.mark.parametrize("k", [1, 15, 16, 100, 576, 1024, 4096, 14336, 28672, 100_000])
@pytest.mark.parametrize("tall", [False, True])
def test_tiles_are_powers_of_two_that_registers_hold(k, tall):
    chosen = {
        "rows": tiles.whole_rows(k, tall),
        "mxfp8": tiles.groups(k, 32, tall),
        "swizzled": tiles.groups(k, 32, tall, tiled=True),
        "large group": tiles.groups(k, 4096, tall),
        "nvfp4": tiles.nvfp4(k, tall),
        "decode": tiles.decode(k),
        "magnitudes": tiles.magnitudes(300, k, tall),
        "encoding": tiles.encoding(300, k, tall),
        "unit": tiles.unit(128, min(k, 128)),
    }
    for name, tile in chosen.items():
        for extent in (tile.rows, tile.columns, tile.warps):
            assert extent == tiles.power_of_two(extent), (name, tile)
        assert tile.columns >= 16, (name, tile)
        assert tile.rows * tile.columns <= 128 * 32 * tile.warps, (name, tile)
    assert chosen["large group"].columns >= 4096


def test_long_columns_get_taller_tiles():
    plan = plans.plan("quantize_nvfp4_", (
        meta(128_256, 8192), meta(128_256, 4096, dtype=torch.uint8), meta(128_256, 512, dtype=torch.uint8),
        meta(1, dtype=torch.float32)[0], "linear", 0, 1, 0,
    ))  # fmt: skip
    assert not isinstance(plan, str)
    (launch,) = plan.launches
    assert launch.grid[1] <= GRID
    assert launch.grid[1] * launch.constants["ROWS"] >= 128_256


def test_offsets_within_a_tile_widen_when_they_must():
    far = torch.empty(1, device="meta", dtype=torch.bfloat16).as_strided((4, 64), (1 << 30, 1))
    for source, wide in ((meta(4, 64), False), (far, True)):
        plan = plans.plan("quantize_fp8_", fp8(4, 64, (1, 0), source))
        assert not isinstance(plan, str)
        assert plan.launches[0].constants["WIDE"] is wide


def launches(operator: str, args: tuple[object, ...]):
    plan = plans.plan(operator, args)
    assert not isinstance(plan, str)
    return plan.launches


WAITING = {
    "tensor.quantize_tensor",
    "tensor_once.quantize_tensor",
    "tensor.nvfp4_scale",
    "blockscaled.quantize_nvfp4",
}
FIRST = {"tensor.amax_partials", "tensor_once.clear"}
"""Kernels that let the next one start."""


def some_launches():
    """Of every operator that quantizes a weight."""
    found = [one for block in UNITS for one in launches("quantize_fp8_", fp8(300, 1000, block))]
    at_once = plans.plan("quantize_fp8_", fp8(3000, 1000, (0, 0))).together  # pyright: ignore
    assert at_once is not None
    found += at_once.launches
    w, s2, place = meta(300, 1000), meta(1, dtype=torch.float32)[0], ("linear", 0, 1, 0, None, False)
    found += launches("nvfp4_tensor_scale_", (w, s2, None, False))
    codes, scales = meta(300, 500, dtype=torch.uint8), meta(300, 63, dtype=torch.uint8)
    found += launches("quantize_nvfp4_", (w, codes, scales, s2, *place))
    mx = w, meta(300, 1000, dtype=torch.uint8), meta(300, 32, dtype=torch.uint8)
    return [*found, *launches("quantize_mxfp8_", (*mx, "RCEIL", *place))]


def test_what_reads_an_earlier_launch_waits_and_the_first_sweep_does_not():
    assert {one.kernel for one in some_launches() if one.waits} == WAITING


def test_only_what_waits_is_started_early(monkeypatch):
    pytest.importorskip("triton", reason="needs triton: install the extra `triton`")
    for early in (False, True):
        monkeypatch.setattr(launching, "_early", lambda device, early=early: early)
        for one in some_launches():
            found = launching.settings(one, torch.device("cpu"))
            knows = one.waits or one.kernel in FIRST
            assert found.get("EARLY") == (early if knows else None), one.kernel
            assert ("launch_pdl" in found) == (early and one.waits), one.kernel


def test_long_rows_take_fewer_threads():
    warps = {k: tiles.whole_rows(k, tall=False).warps for k in (2048, 4096, 8192, 11008, 14336, 16384, 28672)}
    assert warps == {2048: 8, 4096: 8, 8192: 16, 11008: 8, 14336: 8, 16384: 8, 28672: 16}


REGISTERS = {
    "rows": (lambda: meta(300, 4096), True),
    "several rows": (lambda: meta(300, 512), True),
    "a region": (lambda: meta(300, 8192)[:, 16:4112], True),
    "experts": (lambda: meta(3, 300, 4096), True),
    "float32": (lambda: meta(300, 4096, dtype=torch.float32), False),
    "long rows": (lambda: meta(300, 14336), False),
    "transposed": (lambda: meta(64, 512).t(), False),
    "every second": (lambda: meta(300, 8192)[:, ::2], False),
    "columns that are no multiple of 16": (lambda: meta(300, 1000), False),
    "rows that are not aligned": (lambda: meta(300, 4104)[:, :4096], False),
    "a start that is not aligned": (lambda: meta(300, 8192)[:, 1:4097], False),
    "rows far apart": (lambda: meta(1).as_strided((4, 4096), (1 << 32, 1)), False),
}


@pytest.mark.parametrize("name", REGISTERS)
def test_registers_are_counted_only_where_none_spill(name):
    make, counted = REGISTERS[name]
    source = make()
    (one,) = launches("quantize_fp8_", fp8(*source.shape[-2:], (1, 0), source))
    assert one.options == ({"maxnreg": tiles.ROW_REGISTERS} if counted else {})


def test_asking_loads_no_triton():
    program = """
import sys, torch
from olq import kernels
import olq.ops
kernels.path("quantize_fp8_", torch.zeros(2, 32), torch.zeros(2, 32, dtype=torch.uint8), torch.zeros(2, 1), 1, 0, False)
kernels.table()
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
