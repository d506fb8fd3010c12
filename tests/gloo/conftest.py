"""All tests of this folder share one pool of worker processes, so they run in one process of pytest-xdist."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/gloo" in item.nodeid:
            item.add_marker(pytest.mark.xdist_group("gloo"))
