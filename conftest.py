"""Before any test computes, and for the tests of both packages: bfloat16 that works, and a real browser."""

import gc

import pytest

from fasterqk.processor import avoid_faulty_amx

# In every process of pytest. Workers inherit the variable, and without one they read the cached answer.
avoid_faulty_amx()

pytest_plugins = ("tests.browser.chromium",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first, so that no worker ends with a long file while the others are idle."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Take what is imported out of garbage collection, which otherwise visits it all again and again."""
    gc.collect()
    gc.freeze()
