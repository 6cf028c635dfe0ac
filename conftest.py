"""What the tests of both packages share: a real browser."""

pytest_plugins = ("tests.browser.chromium",)
