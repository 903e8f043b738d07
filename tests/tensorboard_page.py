"""Open TensorBoard on some runs in headless Chromium, and read what a person would see.

``python -m tests.tensorboard_page runs/quickstart --picture page.png`` checks the curves, the switch and the
samples of real runs (``make check-tensorboard``). It needs Chromium and its driver, as in Debian's packages
``chromium`` and ``chromium-driver``.
"""

import argparse
import contextlib
import io
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request

from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
CURVES = ("train/superposition_loss", "train/loss", "val/loss", "phase/bag_size")

# every text that is shown, inside web components too
SHOWN = """
const found = [];
const walk = (node) => {
  if (node.shadowRoot) walk(node.shadowRoot);
  for (const child of node.childNodes) {
    if (child.nodeType === Node.TEXT_NODE && !['STYLE', 'SCRIPT', 'NOSCRIPT'].includes(node.nodeName)) {
      if (child.textContent.trim()) found.push(child.textContent.trim());
    } else if (child.nodeType === Node.ELEMENT_NODE) walk(child);
  }
};
walk(document.body);
return found.join('\\n');
"""


class Page:
    """A TensorBoard in a browser."""

    def __init__(self, address, driver):
        self.address, self.driver = address, driver

    def text_with(self, plugin, wanted, timeout=60):
        """What the plugin's page shows once ``wanted`` is there, or at the end of the patience."""
        self._go(f"#{plugin}")
        return self._until(lambda: self.driver.execute_script(SHOWN), lambda text: wanted in text, timeout)

    def cards(self, tags, timeout=60):
        """Tag to what its card on the time series page says, of the cards in which curves are drawn."""
        query = urllib.parse.urlencode({"tagFilter": "|".join(f"^{tag}$" for tag in tags)})
        self._go(f"?{query}#timeseries")

        def read():
            cards = self.driver.find_elements("css selector", "card-view")
            shown = {card.text.replace("\n", "", 1).split("\n")[0]: card for card in cards if card.text}
            return {tag: card.text for tag, card in shown.items() if _coloured(card)}

        return self._until(read, lambda cards: set(tags) <= set(cards), timeout)

    def scalars(self, tag):
        """What the server sends to draw each run's curve of ``tag``."""
        for run in self._ask("runs"):
            with contextlib.suppress(urllib.error.HTTPError):  # a run without the tag
                rows = self._ask(f"plugin/scalars/scalars?{urllib.parse.urlencode({'run': run, 'tag': tag})}")
                yield [value for _, _, value in rows]

    def _ask(self, what):
        with urllib.request.urlopen(f"{self.address}/data/{what}", timeout=30) as reply:
            return json.load(reply)

    def _go(self, where):
        self.driver.get("about:blank")  # else only the part behind # would change
        self.driver.get(f"{self.address}/{where}")

    @staticmethod
    def _until(read, enough, timeout):
        deadline = time.monotonic() + timeout
        while not enough(found := read()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return found


@contextlib.contextmanager
def open_page(directory):
    """Start TensorBoard and the browser; both end with the block."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tensorboard.main",
            "--logdir",
            str(directory),
            "--port",
            str(port),
            "--load_fast=false",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1500,1600"):
            options.add_argument(argument)
        with webdriver.Chrome(options=options, service=Service(DRIVER)) as driver:
            address = f"http://127.0.0.1:{port}"
            Page._until(lambda: _answers(address), bool, 60)
            yield Page(address, driver)
    finally:
        server.kill()
        server.wait()


def _coloured(card):
    """Whether the card's chart shows more than its grey axes and grid."""
    charts = card.find_elements("css selector", "line-chart")
    if not charts:
        return False
    picture = Image.open(io.BytesIO(charts[0].screenshot_as_png)).convert("RGB")
    return sum(n for n, (r, g, b) in picture.getcolors(1 << 24) if max(r, g, b) - min(r, g, b) > 25) > 20


def _answers(address):
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/data/runs", timeout=5) as reply:
        return reply.read() != b"[]"
    return False


def faults(page, picture=None):
    """What is missing: the curves, a switch in the one of the bag size, or a sample of text."""
    found = []
    cards = page.cards(CURVES)
    found += [f"no curve of {tag} is drawn" for tag in CURVES if tag not in cards]
    if picture:
        page.driver.save_screenshot(picture)
    if not any(len(set(values)) > 1 for values in page.scalars("phase/bag_size")):
        found.append("the bag size never changes: there is no switch in any run")
    found += [] if "\nModel\n" in page.text_with("text", "\nModel\n") else ["the text page shows no sample"]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory")
    parser.add_argument("--picture", help="where to save what the browser shows, a PNG")
    arguments = parser.parse_args()
    if not (CHROMIUM and DRIVER):
        sys.exit("error: Chromium and chromedriver are needed: apt-get install chromium chromium-driver")
    with open_page(arguments.directory) as page:
        missing = faults(page, arguments.picture)
    for fault in missing:
        print(f"error: {fault}", file=sys.stderr)
    if not missing:
        print("the curves, the switch and the samples are shown")
    return len(missing) > 0


if __name__ == "__main__":
    sys.exit(main())
