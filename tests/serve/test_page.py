"""The web page, in a real Chromium that Playwright drives: chat, what is stored, files, keys, keyboard, sizes."""

import pytest
from browser import executable
from serving import chat_session, running

from remanence.serve.access import add_key
from remanence.serve.database import Database

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(executable() is None, reason="there is no Chromium here"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FACTS = ["My dog is called Rex.", "The code of the gate is 4711."]


@pytest.fixture(scope="module")
def chromium():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as made:
        browser = made.chromium.launch(executable_path=executable(), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    return chat_session(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def served(session, tmp_path_factory):
    with running(session, tmp_path_factory.mktemp("data")) as found:
        yield found


@pytest.fixture
def opened(chromium, served, request):
    """A function that opens the page, at a width, in a colour scheme. At the end, there must have been no error on the
    page, and no request to another place.
    """
    contexts, wrong = [], []

    def make(width=1280, dark=False, url=served.url):
        scheme = "dark" if dark else "light"
        size = {"width": width, "height": 900 if width > 600 else 844}
        contexts.append(chromium.new_context(viewport=size, color_scheme=scheme, accept_downloads=True))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
        page.on("request", lambda each: wrong.append(each.url) if not allowed(each.url, url) else None)
        page.goto(url)
        return page

    yield make
    for each in contexts:
        each.close()
    wrong = [each for each in wrong if "responded with a status of 4" not in each]
    assert not wrong, wrong


def allowed(url, own):
    return url.startswith((own, f"blob:{own}", "data:"))


def create(page, name):
    page.get_by_role("button", name="New").click()
    page.get_by_label("Name").fill(name)
    page.keyboard.press("Enter")
    page.wait_for_function(
        "name => document.getElementById('memory').value === name && document.getElementById('download').disabled",
        arg=name,
    )


def say(page, text, sentence=None):
    before = page.locator(".message").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.wait_for_function(
        "count => document.querySelectorAll('.message').length === count && !document.getElementById('send').hidden",
        arg=before + 2,
    )
    page.get_by_role("button", name=f"Forget: {sentence or text}").wait_for()


def stored(page):
    return page.locator("#sentences span").all_inner_texts()


def confirm(page, label):
    page.get_by_role("dialog").get_by_role("button", name=label, exact=True).click()


def test_a_conversation(opened, served):
    page = opened()
    create(page, "talk")
    for text in FACTS:
        say(page, text)
    assert stored(page) == FACTS[::-1], "the newest first"
    assert page.locator("#stored").inner_text() == "2 sentences"
    assert "KB" in page.locator("#bytes").inner_text()
    answers = page.locator(".message.assistant span").all_inner_texts()
    assert len(answers) == 2 and all(answers) and not page.locator(".cut").count()
    page.reload()
    page.get_by_role("button", name=f"Forget: {FACTS[0]}").wait_for()
    assert page.locator("#memory").input_value() == "talk" and stored(page) == FACTS[::-1]


def test_a_name_that_cannot_be_in_a_path(opened, served):
    page = opened()
    page.get_by_role("button", name="New").click()
    page.get_by_label("Name").fill("a/b")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.getElementById('memory').value.startsWith('mem_')")
    say(page, FACTS[0])
    assert page.locator("#memory option:checked").inner_text() == "a/b" and stored(page) == FACTS[:1]
    assert served.memories.head(served.memories.find("local", "a/b")).bytes


def test_search_and_forget(opened):
    page = opened()
    create(page, "facts")
    for text in FACTS:
        say(page, text)
    page.get_by_label("Search what is stored").fill(FACTS[0])
    page.keyboard.press("Enter")
    page.wait_for_function(
        "text => document.querySelector('#sentences span').textContent === text", arg=FACTS[0]
    )
    page.get_by_role("button", name=f"Forget: {FACTS[1]}").click()
    confirm(page, "Cancel")
    page.get_by_role("button", name=f"Forget: {FACTS[1]}").click()
    confirm(page, "Forget")
    page.wait_for_function("() => document.querySelectorAll('#sentences li').length === 1")
    assert stored(page) == FACTS[:1] and page.locator("#stored").inner_text() == "1 sentence"


def test_download_upload_fork_and_delete(opened, served, tmp_path):
    page = opened()
    create(page, "files")
    assert page.get_by_role("button", name="Download").is_disabled()
    say(page, FACTS[0])
    with page.expect_download() as found:
        page.get_by_role("button", name="Download").click()
    assert found.value.suggested_filename == "files.mem"
    found.value.save_as(tmp_path / "files.mem")
    page.get_by_role("button", name="Fork").click()
    page.get_by_label("Name").fill("files b")
    confirm(page, "Fork")
    page.wait_for_function("() => document.getElementById('memory').value === 'files b'")
    say(page, FACTS[1])
    page.set_input_files("#file", tmp_path / "files.mem")
    confirm(page, "Upload")
    page.wait_for_function("() => document.querySelectorAll('#sentences li').length === 1")
    assert stored(page) == FACTS[:1]
    (tmp_path / "bad.mem").write_bytes(b"nothing")
    page.set_input_files("#file", tmp_path / "bad.mem")
    confirm(page, "Upload")
    assert page.get_by_role("alert").inner_text().startswith("file: ")
    page.get_by_role("button", name="Delete").click()
    confirm(page, "Delete")
    page.wait_for_function("() => document.getElementById('memory').value !== 'files b'")
    names = [each.name for each in served.memories.database.memories("local")]
    assert "files" in names and "files b" not in names


def test_an_answer_is_stopped(opened, served):
    """The memory is as it was before."""
    page = opened()
    create(page, "stopped")
    page.route("**/v1/chat/completions", lambda route: route.continue_(
        post_data=route.request.post_data.replace('"stream":true', '"stream":true,"max_tokens":60000')))  # fmt: skip
    page.get_by_label("Message", exact=True).fill("hello")
    page.get_by_role("button", name="Send").click()
    page.wait_for_function("() => document.querySelector('.message.assistant span').textContent.length > 3")
    page.get_by_role("button", name="Stop").click()
    page.locator(".message.cut").wait_for()
    served.wait_until_idle()
    memory = served.memories.find("local", "stopped")
    assert not served.memories.head(memory).bytes
    assert page.get_by_role("button", name="Send").is_visible()


def test_with_the_keyboard_alone(opened):
    page = opened()
    create(page, "keys only")
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type(FACTS[0])
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("And a second line.")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Forget: And a second line.").wait_for()
    reached = set()
    page.get_by_label("Memory", exact=True).focus()
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
    assert {
        "new",
        "log",
        "message",
        "send",
        "download",
        "upload",
        "fork",
        "delete",
        "query",
        "Forget",
    } <= reached
    page.get_by_role("button", name="Delete").focus()
    page.keyboard.press("Enter")
    assert page.get_by_role("dialog").is_visible()
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0 and page.locator("#memory").input_value() == "keys only"


NAMELESS = """() => [...document.querySelectorAll('button, input, select, textarea')].filter(each =>
    !(each.labels?.length || each.getAttribute('aria-label') || each.textContent.trim())).map(each => each.outerHTML)"""
CONTRAST = """() => {
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    const linear = x => x <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4;
    const light = ([r, g, b]) => [r, g, b].map(x => linear(x / 255))
        .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
    const ground = each => { for (; each; each = each.parentElement) {
        const own = numbers(getComputedStyle(each).backgroundColor);
        if (own[3] !== 0) return own; } return [255, 255, 255]; };
    const bad = [];
    for (const each of document.querySelectorAll('body *')) {
        if (![...each.childNodes].some(node => node.nodeType === 3 && node.textContent.trim())) continue;
        if (!each.checkVisibility() || each.disabled || each.tagName === 'OPTION') continue;
        const [a, b] = [light(numbers(getComputedStyle(each).color)), light(ground(each))];
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < 4.5) bad.push(`${each.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
    return bad;
}"""


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_widths_and_colours(opened, served, width, dark):
    """Nothing is cut off, everything has a name, and text has the contrast that WCAG asks for."""
    page = opened(width, dark)
    create(page, f"width {width} {dark}")
    if not page.locator("#panel").get_attribute("open") is not None:
        page.locator("#panel summary").click()
    say(page, "A" * 40 + " is long. " + FACTS[0], FACTS[0])
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight"), "only the parts scroll"
    for name in ("Send", "Download", "Delete"):
        box = page.get_by_role("button", name=name, exact=True).bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width and box["height"] >= 36
    assert page.evaluate(NAMELESS) == [] and page.evaluate(CONTRAST) == []
    if width < 600:
        page.locator("#panel summary").click()
        assert page.locator("#log").bounding_box()["height"] > 400


def test_a_key_is_asked_for(opened, session, tmp_path):
    (tmp_path / "data").mkdir()
    database = Database(tmp_path / "data" / "memories.sqlite")
    key = add_key(database, "ann")[1]
    database.close()
    with running(session, tmp_path / "data") as other:
        page = opened(url=other.url)
        page.get_by_label("Key", exact=True).fill("wrong")
        page.keyboard.press("Enter")
        assert page.get_by_role("alert").inner_text() == "The server does not know this key."
        page.get_by_label("Key", exact=True).fill(key)
        page.keyboard.press("Enter")
        say(page, FACTS[0])
        assert [each.name for each in other.memories.database.memories("ann")] == ["me"]
