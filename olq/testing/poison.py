"""A pytest plugin: each test runs inside `olq.alloc.audit()`, so that unwritten kernel-owned memory fails it.

Switch it on in a conftest.py:

    pytest_plugins = ["olq.testing.poison"]

A test that makes such memory and leaves it unwritten on purpose says so:

    @pytest.mark.unaudited(reason="only shapes and strides are looked at")

Tests that audit by themselves need nothing: the innermost audit judges what is allocated inside it.
"""

from collections.abc import Iterator

import pytest

from olq.alloc import audit


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers",
        "unaudited(reason): kernel-owned memory may stay unwritten in this test, for a stated reason",
    )


@pytest.fixture(autouse=True)
def kernel_memory_is_written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Poison what olq.alloc makes in a test, and raise `CoverageError` after it for bytes nobody wrote."""
    marker = request.node.get_closest_marker("unaudited")
    if marker is not None:
        if not marker.kwargs.get("reason"):
            pytest.fail("unaudited needs a reason: @pytest.mark.unaudited(reason=...)", pytrace=False)
        yield
        return
    with audit():
        yield
