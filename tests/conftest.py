"""Settings of the test suite: hypothesis profiles, and which tests this machine can run.

HYPOTHESIS_PROFILE chooses how property tests draw: `dev` (default: random, few), `ci` (the same examples each
time), `nightly` (random, many). A test that needs what is not here is skipped and says what it needs.

Kernel-owned memory starts as poison in every test, and a byte of it that nobody wrote fails the test. `--record FILE`
appends what the tests marked `cuda` gave: recording.py.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["olq.testing.poison", "recording", "interpreting"]

# One example may be slow, the first call of an operator loads code; pytest-timeout bounds the whole test.
_COMMON = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("dev", _COMMON, max_examples=50)
settings.register_profile("ci", _COMMON, max_examples=50, derandomize=True, database=None)
settings.register_profile("nightly", _COMMON, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_configure(config: pytest.Config) -> None:
    # Workers of xdist have the cores to share: with as many threads as cores in each, threads wait for ones that don't
    # run, and what takes a tenth of a second takes minutes.
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run tests marked slow too")
    parser.addoption("--require-gpu", action="store_true", help="fail when there is no CUDA device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_cuda = torch.cuda.is_available()
    if config.getoption("--require-gpu") and not has_cuda:
        raise pytest.UsageError("--require-gpu: torch finds no CUDA device here")
    lacks = {
        "cuda": None if has_cuda else "needs a CUDA device",
        "sm100": None
        if has_cuda and torch.cuda.get_device_capability() >= (10, 0)
        else "needs compute capability 10.0 or later",
        "slow": None if config.getoption("--slow") else "takes minutes: run with --slow",
    }
    for item in items:
        for marker, reason in lacks.items():
            if reason and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
