"""Bytes do not depend on torch's settings of the moment: engines change them while they load."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from numerics import cases


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SETTINGS = {
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default device meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "deterministic algorithms": deterministic,
    "one thread": lambda: threads(1),
    "four threads": lambda: threads(4),
}


def results(name: str, w: torch.Tensor, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Codes and scales written into `outputs`, then decoded values, by the operators alone."""
    codes, scale, *scale_2, out = outputs
    place = ("swizzled_128x4", 0, 1, 0)
    if name == "fp8":
        cases.OPS.quantize_fp8_(w, codes, scale, 1, 0, False)
        cases.OPS.dequantize_fp8_(codes, scale, out, 1, 0)
    elif name == "mxfp8":
        cases.OPS.quantize_mxfp8_(w, codes, scale, "RCEIL", *place)
        cases.OPS.dequantize_mxfp8_(codes, scale, out, *place)
    else:
        cases.OPS.nvfp4_tensor_scale_(w, *scale_2)
        cases.OPS.quantize_nvfp4_(w, codes, scale, *scale_2, *place)
        cases.OPS.dequantize_nvfp4_(codes, scale, *scale_2, out, *place)
    return outputs


def storage(name: str) -> list[torch.Tensor]:
    out = torch.zeros(40, 100)
    if name == "fp8":
        return [cases.poison(40, 100), torch.zeros(40, 1), out]
    if name == "mxfp8":
        return [cases.poison(40, 100), cases.poison(128, 4), out]
    return [cases.poison(40, 50), cases.poison(128, 8), torch.zeros(()), out]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4"])
def test_settings_do_not_change_a_byte(name, setting):
    w = torch.randn(40, 100, generator=torch.Generator().manual_seed(0))
    want, got = results(name, w, storage(name)), storage(name)
    with SETTINGS[setting]():
        results(name, w, got)
    for g, o in zip(got, want, strict=True):
        cases.assert_bytes_equal(g, o, setting)
