"""A browser, and a Prefect server of ours that has seen a run trained twice.

As a command, `python tests/ui_fixtures.py FOLDER`, it trains that run, with tiny steps: in a process of its own, since
Prefect keeps the server that a process has first met.
"""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from flows.command import client_settings
from flows.server import ServerRecord, ensure_server, home, stop_server, wait_until_ready

T = TypeVar("T")
PATIENCE = 60.0
"""Seconds to wait for something to show."""
MISSING_IN_PREFECT = ("/favicon.ico", "/ico/undefined.svg")
"""Icons that pages of Prefect 3.9 ask for and its server has not."""


class Page:
    """What somebody sees who opens Prefect's UI."""

    def __init__(self, driver: webdriver.Chrome, server: ServerRecord) -> None:
        self.driver, self._server = driver, server

    def open(self, path: str) -> None:
        self.driver.get(f"{self._server.ui}/{path}")

    def wait(self, condition: Callable[[], T]) -> T:
        """What `condition` gives, once that is something."""
        return WebDriverWait(self.driver, PATIENCE).until(lambda _: condition())

    def find(self, selector: str) -> WebElement:
        """The first element that a CSS selector finds, once it is there."""
        return self.wait(lambda: self.all(selector))[0]

    def all(self, selector: str) -> list[WebElement]:
        """All that it finds now."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str = "body") -> str:
        return self.find(selector).text

    def read(self, path: str, **body: Any) -> Any:
        """What the API answers."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._server.api}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def pixels(self, element: WebElement, colour: str) -> int:
        """How many pixels of an element, as it is seen, fulfil an expression of `r`, `g` and `b`."""
        script = """
            const [picture, colour, done] = arguments, image = new Image();
            image.onload = () => {
                const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
                context.drawImage(image, 0, 0);
                const bytes = context.getImageData(0, 0, image.width, image.height).data;
                const fits = Function("r, g, b", colour);
                let count = 0;
                for (let i = 0; i < bytes.length; i += 4) count += fits(bytes[i], bytes[i + 1], bytes[i + 2]);
                done(count);
            };
            image.src = "data:image/png;base64," + picture;"""
        return int(self.driver.execute_async_script(script, element.screenshot_as_base64, f"return {colour}"))

    def errors(self) -> list[str]:
        """What the browser's console has of errors since the last time, and what the page says of one."""
        entries = [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]
        known = [f"{self._server.ui}{icon}" for icon in MISSING_IN_PREFECT]
        logged = [message for message in entries if not message.startswith(tuple(known))]
        return logged + [line for line in self.text().splitlines() if "error" in line.lower()]


@pytest.fixture
def page(trained: ServerRecord) -> Iterator[Page]:
    """A browser for the server. Nothing else can be reached from it, so that a page which needs more has errors."""
    options = webdriver.ChromeOptions()
    options.binary_location = found("chromium")
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "window-size=1500,1200"):
        options.add_argument(f"--{argument}")
    options.add_argument("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService(found("chromedriver"))) as driver:
        driver.set_script_timeout(PATIENCE)
        yield Page(driver, trained)


@pytest.fixture
def trained(runs: Path, tmp_path: Path) -> Iterator[ServerRecord]:
    """The server, which has seen the run `night` trained, and trained again."""
    found("chromium"), found("chromedriver")
    server = ensure_server(home())
    try:
        wait_until_ready(home(), server)
        command = [sys.executable, str(Path(__file__)), str(tmp_path)]
        subprocess.run(command, env=os.environ | client_settings(server), check=True, timeout=200)
        yield server
    finally:
        stop_server(home())


def found(program: str) -> str:
    """Where a program is; without it the test is skipped."""
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"there is no {program} here: apt-get install chromium chromium-driver")
    return path


def train_twice(folder: Path) -> None:
    """The second time finds everything finished."""
    from flow_fixtures import config_of, tiny_steps

    from flows.train import train

    with pytest.MonkeyPatch.context() as patch:
        tiny_steps(patch)
        for _ in range(2):
            train(config_of(folder))


if __name__ == "__main__":
    train_twice(Path(sys.argv[1]))
