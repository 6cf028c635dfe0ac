"""A real Chromium for these tests; every page must stay silent and off the network."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
MISSING = (
    "browser tests did not run: no Chromium found; "
    "install one (apt-get install chromium) or set FASTERQK_CHROMIUM"
)
# Texts that try to leave where they stand: attributes, tags, scripts, style sheets, templates, directions.
HOSTILE = (
    '"><img src=x onerror="window.broken = true">'
    "</style></title></script><script>window.broken = true</script>"
    " ' onload='window.broken = true' \" onload=\"window.broken = true\" {{ window.broken = true }}"
    " ${window.broken = true} `${window.broken = true}` javascript:window.broken=true \u202egnp.exe"
)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def find_chromium() -> str | None:
    """The browser named by $FASTERQK_CHROMIUM, else the first known one on the path."""
    named = os.environ.get("FASTERQK_CHROMIUM")
    if named:
        return named if os.access(named, os.X_OK) else None
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def is_required() -> bool:
    """Whether a missing browser is a failure rather than a remark."""
    return os.environ.get("CI", "").lower() in {"1", "true"}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if find_chromium() or is_required():
        return
    ours = [item for item in items if "browser" in getattr(item, "fixturenames", ())]
    if ours:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]
        config.stash[_SAY] = MISSING


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if _SAY in config.stash:
        terminalreporter.write_line(config.stash[_SAY])


_SAY: pytest.StashKey[str] = pytest.StashKey()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    executable = find_chromium()
    if executable is None:
        pytest.fail(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable, args=FLAGS)
        yield chromium
        chromium.close()


@contextmanager
def quiet_pages(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens files, fresh and offline; in the end no page may have complained or asked the network."""
    contexts, complaints = [], []

    def open_file(path: Path, fragment: str = "", **options: Any) -> Any:
        size = {"width": 1200, "height": 900}
        context = browser.new_context(**{"offline": True, "viewport": size, **options})
        context.set_default_timeout(120_000)  # a busy machine is no failure
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        address = path.resolve().as_uri()

        def check_request(request: Any) -> None:
            if request.url.split("#")[0] != address and not request.url.startswith("data:"):
                complaints.append(f"request: {request.url}")

        def check_console(said: Any) -> None:
            if said.type in {"error", "warning"}:
                complaints.append(f"console: {said.text}")

        page.on("request", check_request)
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("console", check_console)
        page.goto(address + fragment)
        return page

    yield open_file
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """``open_page(path, fragment, **context options)`` for one test."""
    with quiet_pages(browser) as open_file:
        yield open_file


@pytest.fixture(scope="module")
def open_shared_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """The same for pages that all tests of a file look at."""
    with quiet_pages(browser) as open_file:
        yield open_file


@pytest.fixture
def phone() -> dict[str, Any]:
    """Context options of a small phone."""
    return {"viewport": {"width": 360, "height": 700}, "has_touch": True, "is_mobile": True}
