"""Before any test computes, and for the tests of both packages: bfloat16 that works, and a real browser."""

from fasterqk.processor import avoid_faulty_amx

# In every process of pytest. Workers inherit the variable, and without one they read the cached answer.
avoid_faulty_amx()

pytest_plugins = ("tests.browser.chromium",)
