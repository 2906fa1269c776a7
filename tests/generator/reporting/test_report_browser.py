"""The page in a real browser without a network: it is drawn in light and dark, on a desktop and on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from generator.reporting.html.page import collect, page
from generator.reporting.show import PREFERRED
from tests.support.processes import BACKSTOP_SECONDS

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium-headless-shell"),
]
Image = pytest.importorskip("PIL.Image", reason="no Pillow, which matplotlib brings")

# No profile and no network: no name is resolved, and the proxy does not exist.
QUIET = (
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    "--disable-background-networking",
    "--disable-component-update",
    "--proxy-server=127.0.0.1:9",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",  # prints what a page writes to its console
)
DARK = "--blink-settings=preferredColorScheme=0"

# Once the page is laid out, asks it what a person would see, and leaves the answers in the document.
ASK = """<script>addEventListener("load", () => {
  const box = (e) => e.getBoundingClientRect();
  const heading = [...document.querySelectorAll("#winners thead button")].find((b) => b.textContent === "us");
  const column = () => [...document.querySelectorAll("#winners tbody tr")].map((r) => Number(r.cells[1].dataset.value));
  heading.click(); const up = column(); heading.click(); const down = column();
  const answer = document.createElement("pre");
  answer.id = "asked";
  answer.textContent = JSON.stringify({
    width: innerWidth, content: document.documentElement.scrollWidth,
    charts: [...document.querySelectorAll("svg")].map((s) => [box(s).width, box(s).height, s.querySelectorAll("circle").length]),
    words: [...document.querySelectorAll("svg text")].map((t) => box(t).height),
    names: [...document.querySelectorAll("figure:not(.wide-chart) svg text.name")].map((t) => box(t).right - box(t.closest("figure")).right),
    paper: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
    up, down, sort: heading.parentElement.getAttribute("aria-sort"),
    loaded: performance.getEntriesByType("resource").map((r) => r.name),
  });
  document.body.append(answer);
});</script>"""


def browse(file: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run the browser on a file; the page must write nothing to its console."""
    command = [str(BROWSER), *QUIET, f"--user-data-dir={folder}", *flags, file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BACKSTOP_SECONDS, check=True)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert not complaints, complaints
    return done


def asked(file: Path, folder: Path, *flags: str) -> dict[str, Any]:
    """The answers of the page to ASK."""
    dom = browse(file, folder, "--dump-dom", "--virtual-time-budget=3000", *flags).stdout
    found = re.search(r'<pre id="asked">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, "the page did not come to its end"
    return json.loads(found[1])


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The page of the committed record; the same page with ASK; and the first page in a frame as wide as a phone."""
    folder = tmp_path_factory.mktemp("pages")
    text = page(collect(PREFERRED, None, None))
    plain, asking, phone = folder / "plain.html", folder / "asking.html", folder / "phone.html"
    plain.write_text(text)
    asking.write_text(text.replace("</body>", f"{ASK}</body>"))
    # A window of a browser cannot be as narrow as a phone; a frame can.
    phone.write_text(
        '<body style="margin: 0"><iframe src="plain.html" style="width: 390px; height: 4000px; border: 0"></iframe>'
    )
    return plain, asking, phone


def shot(file: Path, folder: Path, width: int, height: int, *flags: str) -> Any:
    """A screenshot, as pixels."""
    path = folder / "shot.png"
    browse(file, folder / "profile", f"--window-size={width},{height}", f"--screenshot={path}", *flags)
    image = Image.open(path).convert("RGB")
    assert image.size == (width, height)
    return image


def shares(image: Any) -> dict[tuple[int, int, int], float]:
    """Colour -> its share of the pixels."""
    total = image.width * image.height
    return {colour: count / total for count, colour in image.getcolors(total)}


@pytest.mark.parametrize(("flags", "paper"), [((), (255, 255, 255)), ((DARK,), (15, 19, 23))], ids=["light", "dark"])
def test_the_page_is_drawn(
    pages: tuple[Path, Path, Path], tmp_path: Path, flags: tuple[str, ...], paper: tuple[int, int, int]
) -> None:
    image = shot(pages[0], tmp_path, 1280, 2400, *flags)
    colours = shares(image)
    assert max(colours, key=colours.__getitem__) == paper
    assert 0.6 < colours[paper] < 0.97, "neither blank nor full"
    ours = (0, 103, 177) if not flags else (92, 176, 242)
    assert colours.get(ours, 0) > 0.0003, "the lines of this project are there, in their colour"
    assert len(colours) > 200, "charts and text have soft edges"
    # Each fifth of the page has something on it.
    fifths = [shares(image.crop((0, 480 * i, 1280, 480 * (i + 1)))).get(paper, 0) for i in range(5)]
    assert all(share < 0.995 for share in fifths), fifths


def test_the_page_is_laid_out_on_a_desk(pages: tuple[Path, Path, Path], tmp_path: Path) -> None:
    seen = asked(pages[1], tmp_path, "--window-size=1280,1000")
    assert seen["width"] == 1280
    assert seen["content"] <= 1280, "nothing makes the page scroll sideways"
    assert len(seen["charts"]) >= 6
    assert all(width > 200 and height > 150 and marks >= 4 for width, height, marks in seen["charts"])
    assert min(seen["words"]) > 9, "the words in charts can be read"
    assert max(seen["names"]) <= 0, "no name of a line is cut off"
    assert seen["up"] == sorted(seen["up"])
    assert seen["down"] == sorted(seen["up"], reverse=True)
    assert seen["up"] != seen["down"]
    assert seen["sort"] == "descending"
    assert seen["loaded"] == [], "nothing was fetched"
    assert (seen["paper"], seen["ink"]) == ("rgb(255, 255, 255)", "rgb(22, 25, 29)")


def test_the_page_fits_a_phone(pages: tuple[Path, Path, Path], tmp_path: Path) -> None:
    image = shot(pages[2], tmp_path, 500, 4000).crop((0, 0, 390, 4000))
    assert 0.5 < shares(image)[(255, 255, 255)] < 0.97
    seen = asked(pages[1], tmp_path / "profile", "--window-size=390,800")
    assert seen["content"] <= seen["width"], "what is too wide scrolls within its own frame"
    assert min(seen["words"]) > 9
    assert max(seen["names"]) <= 0


def test_the_browser_test_would_notice(pages: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The checks above can fail: they notice an error in a script, and a file from another host."""
    broken = tmp_path / "broken.html"
    broken.write_text("<script>nothing.here()</script>")
    with pytest.raises(AssertionError, match="nothing is not defined"):
        browse(broken, tmp_path / "profile", "--dump-dom")
    elsewhere = "https://example.org/a.png"
    broken.write_text(
        pages[1].read_text().replace("<body>", f'<body style="min-width: 2000px"><img src="{elsewhere}">')
    )
    seen = asked(broken, tmp_path / "profile", "--window-size=1280,1000")
    assert seen["loaded"] == [elsewhere]
    assert seen["content"] >= 2000
