"""A pytest plugin: `--record FILE` appends one row a session, of the tests marked `cuda`, as a line of JSON.

A row holds when, at which commit and on what they ran, the session's exit status, and for each test file how many
passed, failed and were skipped, with the names of those that failed; a test that breaks outside its body failed.
`python -m benchmarks.pages` makes docs/verified.md of such rows. Under pytest-xdist the controller writes, once.
"""

import json
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch

from benchmarks.checkout import commit

MARK = ("marked", "cuda")  # travels from a worker to the controller with each report
CRASHED = "???"  # xdist's name of the phase in which a worker died; such a report has no properties
ORDER = (
    "skipped",
    "passed",
    "failed",
)  # a test's phases, as pytest names their outcomes: the last of these counts


def _driver() -> str | None:
    if not torch.cuda.is_available() or not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.split("\n")[0].strip() or None if done.returncode == 0 else None


def machine() -> dict[str, str | None]:
    """What the tests ran on; None for what is not there or can't be told."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": _driver(),
        "torch": torch.__version__,
        "triton": triton,
        "python": platform.python_version(),
    }


class Recorder:
    """Collects outcomes, and writes the row when the session ends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.commit = commit()  # now: what is committed while tests run is not what they ran
        self.outcomes: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != CRASHED and MARK not in map(tuple, report.user_properties):
            return
        if report.passed and report.when != "call":  # setup and teardown that pass say nothing about the test
            return
        if report.outcome not in ORDER:  # a plugin's, such as "rerun": the test's own is still to come
            return
        before = self.outcomes.get(report.nodeid, ORDER[0])
        self.outcomes[report.nodeid] = max(before, report.outcome, key=ORDER.index)

    def files(self) -> dict[str, dict[str, object]]:
        """Counts and failures of each test file."""
        found: dict[str, dict[str, list[str]]] = {}
        for node, outcome in sorted(self.outcomes.items()):
            name, _, test = node.partition("::")
            found.setdefault(name, {key: [] for key in ORDER})[outcome].append(test)
        return {
            name: {
                "passed": len(tests["passed"]),
                "failed": len(tests["failed"]),
                "skipped": len(tests["skipped"]),
                "failures": tests["failed"],
            }
            for name, tests in found.items()
        }

    # Before xdist waits for its workers to end, which an interrupt may cut short.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        row = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "commit": self.commit,
            **machine(),
            "exit": int(exitstatus),
            "files": self.files(),
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="append a row on the tests marked cuda to this file")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--record")
    if file and not hasattr(config, "workerinput") and not config.getoption("collectonly"):
        config.pluginmanager.register(Recorder(config.invocation_params.dir / file), "olq-recorder")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("cuda"):
            item.user_properties.append(MARK)
