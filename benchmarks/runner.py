"""What the GPU benchmarks share: command line, the machine's facts, rows kept as JSON lines, exit statuses.

A benchmark compares bytes or values first, and does not time what is wrong.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.checkout import commit

#: Exit statuses: bytes or values are wrong; a target was missed, under `--check`; there is no device to run on. With 2
#: argparse ends when it does not understand a command line.
WRONG, MISSED, NO_GPU = 1, 3, 4


def options(
    argv: list[str] | None, module: str, doc: str, *, cases: Iterable[str], rounds: int, check: bool = True
) -> argparse.Namespace:
    """Parse a command line: `case` (a list, or None for all), `rounds`, `results` (a path or None), `check`.

    Args:
        argv: None is that of the process.
        module: name of the benchmark's module below `benchmarks`.
        doc: its docstring; the first line is shown as help.
        cases: names to choose from.
        rounds: as many as there are by default.
        check: whether the benchmark has targets that it can fail for.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=doc.split("\n")[0])
    parser.add_argument("--case", action="append", choices=list(cases), help="default: all")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--results", type=Path, help="append rows to this file, as JSON lines")
    if check:
        parser.add_argument("--check", action="store_true", help="fail if a target is missed")
    return parser.parse_args(argv)


def warm_up(seconds: float = 0.5) -> None:
    """Keep the GPU busy: one that was idle runs slower at first."""
    source = torch.zeros(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        target.copy_(source)
        torch.cuda.synchronize()


def environment() -> dict[str, object]:
    """The machine, the versions and the commit that the numbers belong to."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton,
        "python": ".".join(map(str, sys.version_info[:3])),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
    }


def keep(row: Mapping[str, object], results: Path | None) -> None:
    """Append a row to a file of results, if there is one."""
    if results is not None:
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
