"""Which code a measurement or a test run speaks for."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit(folder: Path = ROOT) -> str:
    """The commit of a checkout, with "-dirty" if files differ from it or are new; results do not count.

    The environment variable OLQ_COMMIT goes before, for a copy of which git can't tell; without either, "unknown".
    """
    if given := os.environ.get("OLQ_COMMIT"):
        return given
    top = _git(folder, "rev-parse", "--show-toplevel")
    head = _git(folder, "rev-parse", "HEAD")
    if head is None or top is None or Path(top).resolve() != folder.resolve():
        return "unknown"
    changed = _git(
        folder, "--no-optional-locks", "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results"
    )
    return head if changed == "" else f"{head}-dirty"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
