"""Errors of the command line: the message, without the traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from olq.errors import OlqError


@contextmanager
def told() -> Iterator[None]:
    """End the program with olq's message, or with the path that could not be read."""
    try:
        yield
    except (OlqError, OSError) as error:
        sys.exit(f"error: {error}")
