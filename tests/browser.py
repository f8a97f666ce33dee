"""Opens every page of the built site in a browser (`make docs-test`): at the width of a desk and of a phone."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

SITE = Path(__file__).parents[1] / "site"
PAGES = sorted(page.name for page in SITE.glob("*.html"))
WIDTHS = {"desk": 1280, "phone": 390}


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where the folder of the site is served."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "http.server",
        "0",
        "--bind",
        "127.0.0.1",
        "--directory",
        str(SITE),
    ]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout
        port = server.stdout.readline().split(" port ")[1].split()[0]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.communicate()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium")
    assert path, "no chromium on PATH"
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page that notes in `.wrong` its errors, failed requests, and requests to elsewhere."""
    found = browser.new_page()
    found.wrong = []
    found.on("console", lambda said: said.type in ("error", "warning") and found.wrong.append(said.text))
    found.on("pageerror", lambda error: found.wrong.append(str(error)))
    found.on("response", lambda answer: answer.status >= 400 and found.wrong.append(answer.url))
    found.on(
        "request",
        lambda asked: (
            asked.url.startswith(("http", "ws"))
            and not asked.url.startswith(address)
            and found.wrong.append(f"asks {asked.url}")
        ),
    )
    yield found
    found.close()


def test_the_site_was_built() -> None:
    assert len(PAGES) > 15, "first `make docs`"


def test_code_that_is_wider_than_a_phone_has_a_shadow_at_its_edge(page: Any, address: str) -> None:
    page.set_viewport_size({"width": WIDTHS["phone"], "height": 844})
    page.goto(f"{address}/index.html")
    blocks = page.locator("pre > code").all()
    assert any(block.evaluate("code => code.scrollWidth > code.clientWidth") for block in blocks)
    for block in blocks:
        assert "gradient" in block.evaluate("code => getComputedStyle(code).backgroundImage")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_an_error_and_fits(
    page: Any, address: str, name: str, width: str, scheme: str
) -> None:
    page.set_viewport_size({"width": WIDTHS[width], "height": 900})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{address}/{name}")
    assert page.locator("h1").count() == 1
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(wide) <= 0, "the page scrolls sideways"
    covers = """[...document.querySelectorAll('pre > .md-code__nav')].filter(
        n => n.getBoundingClientRect().left < n.nextElementSibling.getBoundingClientRect().right).length"""
    assert width == "desk" or page.evaluate(covers) == 0, "a button that copies covers code"
    broken = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
    page.wait_for_load_state("networkidle")
    assert page.evaluate(broken) == []
    if folder := os.environ.get("SCREENSHOTS"):
        page.screenshot(path=f"{folder}/{name}-{width}-{scheme}.png", full_page=True)
    assert page.wrong == []


@pytest.mark.parametrize("name", PAGES)
def test_every_link_of_a_page_leads_to_something(page: Any, address: str, name: str) -> None:
    page.goto(f"{address}/{name}")
    for link in page.evaluate("[...document.querySelectorAll('a[href]')].map(a => a.href)"):
        assert link.startswith(address), link
        path, _, anchor = link.removeprefix(address).partition("#")
        target = SITE / path.strip("/") if path.strip("/") else SITE / "index.html"
        assert target.is_file(), link
        if anchor and not anchor.startswith("__"):
            assert f'id="{anchor}"' in target.read_text(), link


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("fewer samples than ranks", "data"),
        ("IterableDataset", "data"),
        ("NCCL watchdog", "troubleshooting"),
        ("early stopping", "checkpoints"),
        ("best checkpoint", "checkpoints"),
    ],
)
@pytest.mark.parametrize("opened", ["by a server", "from a disk"])
def test_the_search_finds_a_page_by_a_users_words(
    page: Any, address: str, opened: str, words: str, found: str
) -> None:
    page.goto(f"{address}/index.html" if opened == "by a server" else (SITE / "index.html").as_uri())
    page.locator("input[data-md-component=search-query]").first.click()
    page.keyboard.type(words)
    # results for the first words come before the last word is typed
    typed = f".md-search-result__link[href*='{words.split()[-1]}' i]"
    page.locator(typed).first.wait_for(timeout=10_000)
    links = page.evaluate("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href)")
    # a page has several results, one for each heading
    pages = list(dict.fromkeys(Path(urlsplit(link).path).stem for link in links))
    assert found in pages[:3], pages
    assert page.wrong == []
