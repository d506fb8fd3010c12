"""The page in a real browser: a person types a prompt, watches the steps, sees the result, an error, and stops."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.gloo.test_serve_support import kept
from tests.unit.test_serve_app import ready
from tests.unit.test_serve_schema import listening

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium")
# as root there is no sandbox to be had; the others keep it from asking other hosts
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
DESKTOP, PHONE = {"width": 1200, "height": 900}, {"width": 360, "height": 740}
LONG = {"Size": "512x512", "Steps": "190"}
PATIENCE_MS = 30_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    found = browser.new_page(viewport=DESKTOP)
    found.set_default_timeout(PATIENCE_MS)
    wrong: list[Any] = []
    found.on("pageerror", lambda error: wrong.append(error))
    yield found
    found.close()
    assert wrong == [], "a script on the page failed"


def fill(page: Page, url: str, prompt: str = "a fox", **fields: str) -> Locator:
    """Open the page and type; returns the button that begins."""
    page.goto(url)
    expect(page.get_by_label("Prompt", exact=True)).to_be_focused()
    page.keyboard.type(prompt)
    for label, text in fields.items():
        page.get_by_label(label).fill(text)
    return page.get_by_role("button", name="Generate")


def stop(page: Page) -> Locator:
    return page.get_by_role("button", name="Stop")


def test_a_person_watches_the_steps_and_sees_the_picture(page: Page) -> None:
    fill(page, kept("zimage", 1).url, "a red fox", Size="384x384", Steps="150", Seed="7")  # some seconds
    page.get_by_label("Prompt", exact=True).press("Control+Enter")
    bar = page.get_by_role("progressbar", name="Progress")
    expect(bar).to_be_visible()
    expect(page.get_by_text(re.compile(r"^Step [1-9]\d* of 150$"))).to_be_visible()
    assert 0 < float(bar.evaluate("bar => bar.value")) <= 1
    picture = page.get_by_role("img", name="a red fox")
    expect(page.get_by_role("status")).to_have_text(
        re.compile(
            r"^Done in [\d.]+ s with seed 7, on rank 0; attention: none \(one rank holds the whole sequence\)\.$"
        )
    )
    assert picture.evaluate("async img => { await img.decode(); return [img.naturalWidth, img.naturalHeight] }") == [
        384,
        384,
    ]
    expect(bar).to_be_hidden()
    with page.expect_download() as saved:
        page.get_by_role("link", name="Save the file").click()
    assert saved.value.suggested_filename == "zimage-7.png"


def test_what_the_server_refuses_is_told_and_mended(page: Page) -> None:
    go = fill(page, kept("zimage", 1).url, Size="100x80", Steps="2")
    go.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text(
        "Error: width 100 is no multiple of 16, as zimage needs; the nearest is 96"
    )
    expect(go).to_be_focused()  # it went to the other button and came back
    expect(stop(page)).to_be_disabled()
    page.get_by_label("Size").fill("96x80")
    go.click()
    expect(page.get_by_role("img", name="a fox")).to_be_visible()
    expect(page.get_by_role("alert")).to_be_hidden()


def test_what_is_no_size_is_not_even_sent(page: Page) -> None:
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request) if request.method == "POST" else None)
    fill(page, kept("zimage", 1).url, Size="big").click()
    expect(page.locator("input:invalid")).to_have_attribute("id", "size")
    assert sent == []


def test_stop_ends_the_request(page: Page) -> None:
    server = kept("zimage", 1)
    go = fill(page, server.url, **LONG)
    go.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text(re.compile(r"^Step [1-9]\d* of 190$"))).to_be_visible()
    expect(stop(page)).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.get_by_role("alert")).to_be_hidden()
    expect(go).to_be_focused()
    server.until({"running": 0, "queued": 0}, limit_s=10)


def test_a_video_is_shown_and_can_be_stopped(page: Page) -> None:
    server = kept("wan", 1)
    fields = {"Size": "80x48", "Frames": "5", "Guidance": "1"}
    fill(page, server.url, **fields, Steps="3").click()
    expect(page.get_by_role("status")).to_have_text(re.compile("^Done in"))
    width = page.locator("video").evaluate("async video => { await video.play(); return video.videoWidth }")
    assert width == 80
    fill(page, server.url, Size="320x192", Frames="17", Guidance="1", Steps="200").click()  # many seconds
    expect(page.get_by_text(re.compile(r"^[1-9]\d* %$"))).to_be_visible()
    stop(page).click()
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    server.until({"running": 0, "queued": 0}, limit_s=10)


def test_a_server_with_a_token_asks_for_it(page: Page, tmp_path: Path) -> None:
    service, _ = ready(tmp_path, "zimage", service={"token_env": "TOKEN"})
    with listening(service) as url:
        fill(page, url, Token="wrong", Size="64x32").click()
        expect(page.get_by_role("alert")).to_contain_text("this server's token")
        fill(page, url, Token="secret", Size="64x32").click()
        expect(page.get_by_role("status")).to_have_text(re.compile("^Done in"))


def test_a_server_that_is_gone_is_told(page: Page, tmp_path: Path) -> None:
    service, _ = ready(tmp_path, "zimage")
    with listening(service) as url:
        go = fill(page, url)
    go.click()
    expect(page.get_by_role("alert")).to_have_text("Error: the server does not answer")


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("name", ["zimage", "wan"])
def test_nothing_overlaps_or_sticks_out(name: str, size: Any, page: Page) -> None:
    page.set_viewport_size(size)
    page.goto(kept(name, 1).url)
    boxes = [field.bounding_box() for field in page.locator("textarea, input, button").all()]
    assert len(boxes) >= 8
    for number, box in enumerate(boxes):
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= size["width"]
        for other in boxes[:number]:
            assert other is not None
            apart = box["x"] >= other["x"] + other["width"] or box["y"] >= other["y"] + other["height"]
            assert apart, f"{box} lies over {other}"
