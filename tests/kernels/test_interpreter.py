"""The kernels' bytes on a machine without a GPU: tests of bytes, in a process where Triton interprets.

Triton decides when a kernel is defined whether it is compiled or interpreted; a process can't do both.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "which", "least"),
    [
        ("kernels/test_bytes", "cpu", 40),
        ("kernels/test_tensor_once", "cpu", 35),
        ("kernels/test_activations", "cpu", 40),
        ("kernels/test_batch", "cpu", 30),
        ("kernels/test_dummy", "cpu", 70),
        ("kernels/test_product", "cpu", 15),
        ("kernels/test_linear", "cpu and one_hot", 100),
        ("kernels/test_linear", "cpu and not one_hot", 130),
        ("kernels/test_linear_reads", "reads", 110),
        ("kernels/test_codes", "cpu", 13),
        ("reload/test_repeat", "cpu", 25),
        ("reload/test_repeat_attacks", "cpu", 20),
    ],
)
@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton: install the extra `triton`"
)
def test_interpreted_kernels_write_the_references_bytes(file, which, least):
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            which,
            f"tests/{file}.py",
        ],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= least, run.stdout[-2000:]
    assert "skipped" not in run.stdout
