"""The site: what MkDocs builds, and how the system's Chromium shows it."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [path for path in sorted(DOCS.rglob("*.md")) if "examples" not in path.parts]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", folder]
    command += ["-f", ROOT / "mkdocs.yml"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_site_loads_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text()):
            assert not re.search(r"(?:src|href)=\"?(?:https?:)?//", tag), f"{page.name}: {tag}"
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\"?(?:https?:)?//|@import", sheet.read_text()), sheet.name


def test_the_site_can_be_searched_as_files(site):
    """Browsers start no worker there: the index is a script, and a script of ours stands in."""
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    assert 'src="../assets/iframe-worker.js"' in (site / "guides" / "data.html").read_text()
    assert "window.Worker =" in (site / "assets" / "iframe-worker.js").read_text()


def test_the_glossary_is_that_of_the_contributors(site):
    html = (site / "glossary.html").read_text()
    assert "<td>batch k of an epoch as a function of k; never the files" in html
    assert "data/token_datasets" not in html


def test_pages_are_small_and_have_their_pictures(site):
    for page in site.rglob("*.html"):
        assert page.stat().st_size < 300_000, page
    for picture in site.rglob("*.svg"):
        assert picture.stat().st_size < 100_000, picture
    assert 'src="assets/logo.svg"' in (site / "index.html").read_text()


def test_every_block_is_shown_as_one(site):
    for page in PAGES:
        html = (site / page.relative_to(DOCS)).with_suffix(".html").read_text()
        own = html.split('<div class="doc ')[0]  # before what comes from docstrings
        assert own.count("<pre>") == len(re.findall(r"^ *```+ *\w", page.read_text(), re.M)), (
            page.name
        )
    assert len(PAGES) > 20


def test_names_in_the_pages_lead_to_the_reference(site):
    start = (site / "index.html").read_text()
    assert re.search(
        r'href="reference/decoding\.html#zoo\.generate"[^>]*><code[^>]*>zoo\.gen', start
    )
    reference = (site / "reference" / "training.html").read_text()
    assert re.search(r'href="#zoo\.make_train_step"[^>]*><code[^>]*>make_train_step<', reference)


# --- In a browser -----------------------------------------------------------------------------


class Tab:
    """A page of Chromium, spoken to by its own protocol over two pipes."""

    def __init__(self, folder: Path):
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        command = [str(CHROMIUM), *flags, f"--user-data-dir={folder}"]
        redirected = f'exec "$@" 3<&{to_browser} 4>&{from_browser} 2>/dev/null'
        self._process = subprocess.Popen(
            ["bash", "-c", redirected, "bash", *command], pass_fds=(to_browser, from_browser)
        )
        os.close(to_browser), os.close(from_browser)
        self._number, self._rest, self._session = 0, b"", {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **parameters: Any) -> Any:
        """The answer to a command."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._answers, 1 << 20)
                assert read, "the browser has ended"
                self._rest += read
            text, _, self._rest = self._rest.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression in the page, awaited."""
        options = {"awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", expression=script, **options)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, page: Path) -> None:
        """Load a page, from its file."""
        self.call("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete'")

    def wait(self, condition: str, seconds: float = 90) -> None:
        """Until an expression holds."""
        end = time.monotonic() + seconds
        while not self.run(condition):
            assert time.monotonic() < end, f"not within {seconds} s: {condition}"
            time.sleep(0.02)

    def show(self, width: int, scheme: str) -> None:
        """As on a screen of this width, light or dark."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme_feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[scheme_feature])

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            self.call("Browser.close")
        self._process.wait(20)
        os.close(self._commands), os.close(self._answers)


@pytest.fixture(scope="module")
def tab(tmp_path_factory) -> Iterator[Tab]:
    if CHROMIUM is None:
        pytest.skip("this needs Chromium: apt install chromium")
    tab = Tab(tmp_path_factory.mktemp("browser"))
    yield tab
    tab.close()


# What is beyond the screen, and cannot be scrolled to within a block of its own.
BEYOND = """(() => {
  const width = document.documentElement.clientWidth;
  const scrolls = e => /auto|scroll|hidden/.test(getComputedStyle(e).overflowX);
  const within = e => e && e !== document.body && (scrolls(e) || within(e.parentElement));
  return [...document.querySelectorAll(".md-content *")]
    .filter(e => e.getBoundingClientRect().right > width + 1 && !within(e))
    .map(e => e.outerHTML.slice(0, 100));
})()"""
THEMES = {"light": "default", "dark": "slate"}
# The theme makes a landmark of each button that copies a block.
AXE = """axe.run(document, {
  resultTypes: ["violations"], rules: {"landmark-unique": {enabled: false}}
}).then(found => found.violations.flatMap(
  rule => rule.nodes.map(node => `${rule.id}: ${node.html.slice(0, 100)}`)))"""


def test_pages_can_be_read_on_a_phone_and_by_a_screen_reader(site, tab):
    """Nothing is cut off at two widths; axe finds nothing, in every other page when it is dark."""
    axe = importlib.util.find_spec("axe_core_python")
    if axe is None or axe.origin is None:
        pytest.skip("this needs axe-core: pip install axe-core-python")
    script = Path(axe.origin).with_name("axe.min.js").read_text()
    # 404.html, which a server shows at any address, has links from the root.
    pages, found = sorted({*site.rglob("*.html")} - {site / "404.html"}), []
    for number, page in enumerate(pages):
        scheme, widths = [("light", (390, 1280)), ("dark", (1280, 390))][number % 2]
        tab.show(widths[0], scheme)
        tab.open(page)
        assert tab.run("document.body.dataset.mdColorScheme") == THEMES[scheme]
        if page.parent.name != "reference" or page.name == "types.html":  # the others are alike
            tab.run(f"{script}; 0")
            found += [f"{page.relative_to(site)} {widths[0]}: {x}" for x in tab.run(AXE)]
        for width in widths:
            tab.show(width, scheme)
            found += [f"{page.relative_to(site)} {width}: beyond {x}" for x in tab.run(BEYOND)]
    assert len(pages) > 50
    assert found == []


def test_the_search_finds_names(site, tab):
    """Without a server: all that it loads is in the folder, as the test of tags says."""
    tab.show(1280, "light")
    tab.open(site / "guides" / "data.html")
    tab.run("document.querySelector('.md-search__input').focus()")
    tab.call("Input.insertText", text="RecompilationError")
    typed = "document.querySelector('.md-search__input').dispatchEvent(new Event('keyup'))"
    found = "document.querySelectorAll('.md-search-result__item').length > 0"
    tab.wait(f"{typed}, {found}")  # again, as the page may not have listened yet
    assert "troubleshooting.html" in tab.run(
        "document.querySelector('.md-search-result__list').innerHTML"
    )


def test_the_keyboard_reaches_what_is_seen_in_its_order(site, tab):
    tab.show(1280, "light")
    tab.open(site / "how-to" / "shard.html")
    reached = []
    for _ in range(40):
        for kind in ("rawKeyDown", "keyUp"):
            tab.call("Input.dispatchKeyEvent", type=kind, key="Tab", windowsVirtualKeyCode=9)
        reached.append(
            tab.run(
                "(e => [(e.innerText || e.ariaLabel || e.title || e.placeholder || '').trim(),"
                " e.checkVisibility({visibilityProperty: true})])(document.activeElement)"
            )
        )
    assert reached[0][0] == "Skip to content"
    assert [name for name, seen in reached if not (name and seen)] == []
