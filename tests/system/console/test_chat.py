"""The chat page in a real headless browser, against the real system with the demo model: conversations and settings."""

import json
import re

import pytest

from tests.system.console.browser import Browser
from tests.system.console.chat_page import (
    LAST,
    ask,
    choose,
    finished,
    give_files,
    open_chat,
    pieces,
    plant,
    settings,
)
from tests.system.served import Served, fetch, until_the_end, wait_until

pytestmark = pytest.mark.system
QUESTION = "What is 12 + 7?"
TITLES = "[...document.querySelectorAll('.conversations li a')].map((one) => one.innerText)"


def test_a_chat_streams_and_shows_the_probabilities_of_tokens(console: Served, browser: Browser):
    open_chat(browser, console)
    settings(browser, temperature="0", max_tokens="40")
    ask(browser, QUESTION)
    finished(browser)
    browser.wait("document.querySelector('.turn.assistant .markdown').innerText.includes('19')")
    facts = browser.text(".turn.assistant .facts")
    assert re.search(r"\d+ tokens", facts)
    assert "first token" in facts
    assert browser.text(".context").endswith("/ 2,048 tokens")
    browser.click(".turn.assistant [name=tokens]")
    browser.wait("document.querySelectorAll('.turn.assistant .token').length > 1")
    browser.hover(".turn.assistant .token")
    browser.wait("document.querySelector('.probabilities')?.innerText.includes('%')")
    assert browser.js("document.querySelectorAll('.probabilities span').length") == 5
    # By keyboard, too: the tokens are one stop of the Tab key, and the arrow keys go along.
    assert browser.js("document.querySelectorAll('.token[tabindex=\"0\"]').length") == 1
    browser.js("document.querySelector('.token[tabindex=\"0\"]').focus()")
    browser.key("Home")
    browser.key("ArrowRight")
    assert browser.js("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1
    browser.click(".turn.assistant [name=tokens]")
    # From the answer to its timeline.
    browser.click(".turn.assistant .facts a")
    browser.wait("document.querySelector('.verdict')")
    assert all(url.startswith((f"http://127.0.0.1:{console.port}/", "data:")) for url in browser.requested)


def test_answers_are_regenerated_edited_branched_and_deleted(console: Served, browser: Browser):
    open_chat(browser, console)
    settings(browser, temperature="0", max_tokens="20")
    ask(browser, QUESTION)
    finished(browser)
    browser.wait("document.querySelector('.turn.assistant .markdown').innerText.includes('19')")
    before = browser.text(".turn.assistant .markdown")
    browser.click("[name=again]")
    browser.wait("document.querySelector('.turn.assistant .versions')?.innerText.replace(/\\s+/g, '') === '‹2/2›'")
    finished(browser)
    same = f"document.querySelector('.turn.assistant .markdown')?.innerText === {json.dumps(before)}"
    browser.wait(same)  # at temperature 0
    # An edited question is a branch of its own, with an answer of its own.
    browser.click(".turn.user [name=edit]")
    browser.fill("[name=edited]", "What is 2 + 5?")
    browser.click("[name=save]")
    browser.wait("document.querySelector('.turn.user .versions')?.innerText.replace(/\\s+/g, '') === '‹2/2›'")
    browser.wait("document.querySelector('.turn.assistant .markdown')?.innerText.includes('7')")
    finished(browser)
    browser.click(".turn.user .versions button")
    browser.wait("document.querySelector('.bubble').innerText.includes('12 + 7')")
    browser.wait(same)
    # An answer can be corrected by hand: the model takes it for its own.
    browser.click(".turn.assistant [name=edit]")
    browser.fill("[name=edited]", "It is **nineteen**.")
    browser.click("[name=save]")
    browser.wait("document.querySelector('.turn.assistant strong')?.innerText === 'nineteen'")
    assert "3 / 3" in browser.text(".turn.assistant .versions").replace("\n", " ").replace("‹ ", "")
    browser.click(".turn.assistant [name=delete]")
    browser.wait("document.querySelector('.turn.assistant .versions')?.innerText.includes('/ 2')")
    assert browser.js("asked.length") == 1
    # The arrow key in an empty field edits the last message of the user.
    browser.js("document.querySelector('.ask textarea').focus()")
    browser.key("ArrowUp")
    browser.wait("document.querySelector('[name=edited]')?.value === 'What is 12 + 7?'")
    browser.key("Escape")
    browser.wait("!document.querySelector('[name=edited]')")


def test_conversations_are_kept_searched_renamed_exported_imported_and_deleted(console: Served, browser: Browser):
    open_chat(browser, console)
    settings(browser, max_tokens="8")
    for number, text in enumerate(("The pelican of the bay", "A walk to the harbour"), 1):
        browser.click(".conversations a.button")
        browser.wait("document.querySelectorAll('.turn').length === 0")
        ask(browser, text)
        finished(browser)
        browser.wait(f"{TITLES}.length === {number}")
    assert browser.js(TITLES) == ["A walk to the harbour", "The pelican of the bay"]
    assert browser.js("document.title") == "A walk to the harbour · Antiphon"
    # A reload loses nothing.
    open_chat(browser, console, "chat")
    browser.open("about:blank")
    open_chat(browser, console, "chat")
    browser.wait("document.querySelector('.bubble')?.innerText.includes('harbour')")
    assert browser.js("document.querySelectorAll('.turn').length") == 2
    browser.fill(".conversations [type=search]", "pelican bay")
    browser.wait(f"{TITLES}.length === 1")
    assert browser.js(TITLES) == ["The pelican of the bay"]
    browser.click(".conversations [name=more]")
    browser.click(".conversations [name=rename]")
    browser.fill(".conversations [name=title]", "Birds and the bay")
    browser.key("Enter", "\r")
    browser.wait(f"{TITLES}.includes('Birds and the bay')")
    # An exported file gives the same conversations in another browser: here after all are deleted.
    browser.js(
        "(() => { const made = URL.createObjectURL; URL.createObjectURL = (blob) => { window.file = blob.text();"
        "return made(blob); }; HTMLAnchorElement.prototype.click = () => {}; })()"
    )
    browser.click("[name=export-all]")
    browser.wait("window.file")
    file = browser.js("window.file")
    assert {one["title"] for one in json.loads(file)["conversations"]} == {"Birds and the bay", "A walk to the harbour"}
    browser.js("document.querySelector('.conversations [type=search]').value = '', null")
    browser.click("[name=delete-all]")
    browser.wait(f"{TITLES}.length === 0")
    assert "all 2 conversations" in browser.js("asked.at(-1)")
    take(browser, file)
    browser.wait(f"{TITLES}.includes('Birds and the bay') || document.querySelector('[type=search]').value")
    browser.wait("document.querySelector('.conversations [role=status]')?.innerText.includes('2 conversations')")
    take(browser, json.dumps([{"role": "user", "content": "plain"}, {"role": "assistant", "content": "list"}]))
    browser.wait("document.querySelector('.conversations [role=status]')?.innerText.includes('1 conversation ')")
    take(browser, '{"format": "another"}')
    browser.wait("document.querySelector('.conversations [role=status]')?.innerText.includes('cannot be imported')")


def take(browser: Browser, text: str) -> None:
    """Imports a file."""
    browser.js(
        "(() => { const data = new DataTransfer();"
        f"data.items.add(new File([{json.dumps(text)}], 'file.json', {{type: 'application/json'}}));"
        "const field = document.querySelector('[name=import-file]'); field.files = data.files;"
        "field.dispatchEvent(new Event('change')); })()"
    )


def test_an_answer_can_be_stopped(console: Served, browser: Browser):
    open_chat(browser, console)
    settings(browser, max_tokens="3000", more='{"ignore_eos": true}')
    # The page itself presses the button, because the small model needs no second for all tokens.
    browser.js(
        "(() => { new MutationObserver(() => {"
        "if (document.querySelector('.turn.assistant .markdown')?.innerText.length)"
        "document.querySelector('[name=stop]')?.click(); })"
        ".observe(document.body, {childList: true, subtree: true, characterData: true}); })()"
    )
    ask(browser, "Tell me a very long story.")
    finished(browser)
    found = browser.text(".turn.assistant .facts")
    assert "stopped" in found or "3,000 tokens" in found, "stopped, or the model was faster than the page"
    # The server computes nothing any more, although the stream could be resumed.
    wait_until(lambda: not fetch(console, "GET", "/v1/requests?state=running").json["data"], 60)


def test_every_setting_is_sent_and_can_be_reset(console: Served, browser: Browser):
    open_chat(browser, console)
    plant(browser, pieces("yes"))
    numbers = {"temperature": 0.5, "top_p": 0.9, "top_k": 30, "min_p": 0.05, "max_tokens": 77, "seed": 7}
    numbers |= {"presence_penalty": 0.3, "frequency_penalty": 0.2, "repetition_penalty": 1.1, "thinking_budget": 50}
    settings(browser, system="Be brief.", **{name: str(value) for name, value in numbers.items()})
    settings(browser, stop="END\nSTOP", more='{"min_tokens": 3}')
    choose(browser, ".drawer [name=format]", "schema")
    settings(browser, schema='{"type": "object"}')
    choose(browser, ".drawer [name=thinking]", "off")
    choose(browser, ".drawer [name=effort]", "low")
    browser.click(".drawer [name=probabilities]")
    ask(browser, "hello")
    finished(browser)
    body = browser.js("bodies[0]")
    budget = numbers.pop("thinking_budget")
    assert {name: body[name] for name in numbers} == numbers
    assert body["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert (body["stop"], body["min_tokens"], body["thinking_token_budget"]) == (["END", "STOP"], 3, budget)
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }
    assert (body["chat_template_kwargs"], body["reasoning_effort"]) == ({"enable_thinking": False}, "low")
    assert "logprobs" not in body
    # They outlive a reload, and one button gives the model's own again.
    open_chat(browser, console)
    settings(browser)
    assert browser.js("document.querySelector('.drawer [name=top_k]').value") == "30"
    assert "2,048 tokens" in browser.text(".facts-of-model")
    browser.click("[name=reset]")
    browser.wait("document.querySelector('.drawer [name=top_k]').value === ''")
    plant(browser, pieces("yes"))
    ask(browser, "hello")
    finished(browser)
    assert set(browser.js("bodies[0]")) == {"messages", "stream", "stream_options", "logprobs", "top_logprobs"}


def test_an_error_is_told_in_the_failed_turn_and_retry_asks_again(console: Served, browser: Browser):
    open_chat(browser, console)
    settings(browser, more='{"logit_bias": "oops"}')
    ask(browser, "one")
    browser.wait("document.querySelector('.turn.assistant [role=alert]')?.innerText.includes('logit_bias')")
    # What the failed turn did not say is not sent as the words of the model.
    settings(browser, more=" ")
    plant(browser, pieces("fine"))
    ask(browser, "two")
    finished(browser)
    assert [one["role"] for one in browser.js("bodies[0].messages")] == ["user", "user"]
    browser.click(".turn.assistant [name=retry]")
    browser.wait("bodies.length === 2")
    browser.wait("document.querySelector('.turn.assistant .versions')?.innerText.includes('2 / 2')")
    assert browser.js("bodies[1].messages") == [{"role": "user", "content": "one"}]
    # A setting that cannot be used is told before anything is sent.
    settings(browser, tools="{oops")
    ask(browser, "three")
    browser.wait("document.querySelector('.composer [role=alert]')?.innerText.includes('Tools: not JSON')")
    assert browser.js("bodies.length") == 2
    assert browser.js("document.querySelector('.ask textarea').value") == "three", "nothing that was written is lost"


def test_the_model_calls_a_tool_and_gets_the_result(console: Served, browser: Browser):
    open_chat(browser, console)
    settings(browser, temperature="0", max_tokens="120")
    browser.click("[name=example]")
    choose(browser, "[name=tool_choice]", "required")
    ask(browser, "What is the weather in Paris?")
    finished(browser)
    assert browser.text(".call strong") == "get_weather"
    assert "city" in json.loads(browser.text(".call code"))
    browser.fill("[name=result]", "sunny, 21 degrees")
    choose(browser, "[name=tool_choice]", "none")
    browser.click("[name=results]")
    finished(browser, 2)
    assert "sunny, 21 degrees" in browser.text(".turn.tool")
    assert browser.js("document.querySelector('[role=alert]')") is None


def test_files_are_attached_by_button_paste_and_drop(console: Served, browser: Browser):
    open_chat(browser, console)
    give_files(browser, ("notes.txt", "text/plain", "'The code is 4711.'"), ("song.mp3", "audio/mpeg", "'x'"))
    browser.wait("document.querySelector('.attached')?.innerText.includes('notes.txt')")
    assert "no sound" in browser.text(".composer [role=alert]")
    paste = "data.items.add(new File(['pasted'], 'pasted.md', {type: 'text/markdown'}));"
    browser.js(
        f"(() => {{ const data = new DataTransfer(); {paste} document.querySelector('.ask textarea')"
        ".dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, bubbles: true, cancelable: true})); })()"
    )
    browser.wait("document.querySelectorAll('.attached li').length === 2")
    drop = "data.items.add(new File(['dropped'], 'dropped.py', {type: ''}));"
    browser.js(
        f"(() => {{ const data = new DataTransfer(); {drop} document.body"
        ".dispatchEvent(new DragEvent('drop', {dataTransfer: data, bubbles: true, cancelable: true})); })()"
    )
    browser.wait("document.querySelectorAll('.attached li').length === 3")
    browser.click(".attached li:nth-child(2) button")
    plant(browser, pieces("4711"))
    # Files alone are a message, too.
    browser.js("document.querySelector('.ask textarea').focus()")
    browser.key("Enter", "\r")
    finished(browser)
    content = browser.js("bodies[0].messages[0].content")
    assert content == "File notes.txt:\n```\nThe code is 4711.\n```\n\nFile dropped.py:\n```\ndropped\n```"
    # An image needs a model that takes images, and this is said before anything is sent.
    canvas = "Object.assign(document.createElement('canvas'), {width: 8, height: 8})"
    png = f"await new Promise((done) => {canvas}.toBlob(done))"
    give_files(browser, ("red.png", "image/png", png))
    browser.wait("document.querySelector('.composer [role=alert]')?.innerText.includes('--enable-mm')")


def test_an_image_goes_to_a_model_that_takes_images(console: Served, browser: Browser):
    browser.open(f"http://127.0.0.1:{console.port}/#/requests")
    browser.wait("document.querySelector('main.requests')")
    browser.js(
        "(() => { const real = window.fetch; window.fetch = async (url, ...more) => {"
        "const reply = await real(url, ...more);"
        "if (!String(url).endsWith('v1/models')) return reply; const found = await reply.json();"
        "found.data[0].input_modalities.push('image'); return new Response(JSON.stringify(found)); }; })(), null"
    )
    plant(browser, pieces("A red square."))
    browser.js("location.hash = '#/chat/new', null")
    browser.wait("document.querySelector('.composer')")
    settings(browser)
    browser.wait("document.querySelector('.facts-of-model')?.innerText.includes('text, image')")
    canvas = "Object.assign(document.createElement('canvas'), {width: 8, height: 8})"
    give_files(browser, ("red.png", "image/png", f"await new Promise((done) => {canvas}.toBlob(done))"))
    browser.wait("document.querySelector('.attached img')?.naturalWidth === 8")
    ask(browser, "What do you see?")
    browser.wait("document.querySelector('.bubble img')?.naturalWidth === 8")
    finished(browser)
    text, image = browser.js("bodies[0].messages[0].content")
    assert text == {"type": "text", "text": "What do you see?"}
    assert image["image_url"]["url"].startswith("data:image/png;base64,")


def pdf(text: str) -> str:
    """A PDF file with one line, as an expression of JavaScript."""
    drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET"
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        "<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        "<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R "
        "/Resources << /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >> >>",
        f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
    ]
    body = "".join(f"{number} 0 obj\n{one}\nendobj\n" for number, one in enumerate(objects, 1))
    return json.dumps(f"%PDF-1.4\n{body}trailer << /Root 1 0 R >>\n%%EOF\n")


def test_of_a_pdf_file_its_text_is_sent(console: Served, browser: Browser):
    open_chat(browser, console)
    plant(browser, pieces("read"))
    give_files(
        browser,
        ("paper.pdf", "application/pdf", pdf("The pelican is a bird.")),
        ("broken.pdf", "application/pdf", "'no file of this kind'"),
    )
    browser.wait("document.querySelector('.attached')?.innerText.includes('paper.pdf')")
    browser.wait("document.querySelector('.composer [role=alert]')?.innerText.includes('broken.pdf cannot be read')")
    ask(browser, "What is it?")
    finished(browser)
    content = browser.js("bodies[0].messages[0].content")
    assert content == "What is it?\n\nFile paper.pdf:\n```\nThe pelican is a bird.\n```"
    assert all(url.startswith((f"http://127.0.0.1:{console.port}/", "data:", "blob:")) for url in browser.requested)


def test_a_message_that_is_being_written_outlives_a_change_of_view(console: Served, browser: Browser):
    open_chat(browser, console)
    browser.fill(".ask textarea", "half a thought")
    browser.js("location.hash = '#/requests'")
    browser.wait("document.querySelector('main.requests')")
    browser.js("location.hash = '#/chat'")
    browser.wait("document.querySelector('.ask textarea')?.value === 'half a thought'")


def test_the_view_follows_the_newest_text_unless_one_reads_above(console: Served, browser: Browser):
    open_chat(browser, console)
    lines = [{"content": f"Line {number}.\n\n"} for number in range(200)]
    plant(browser, lines)
    browser.js("window.holdAt = 100, null")
    ask(browser, "Count.")
    browser.wait("document.querySelector('.markdown')?.innerText.includes('Line 98.')")
    end = "(({scrollTop: a, scrollHeight: b, clientHeight: c}) => b - a - c < 5)(document.querySelector('.log'))"
    browser.wait(end)
    assert browser.js("document.querySelector('.ask').getBoundingClientRect().bottom <= innerHeight")
    browser.js("document.querySelector('.log').scrollTop = 0, null")
    browser.wait("document.querySelector('[name=to-end]')")
    browser.js("window.release(), null")
    browser.wait("document.querySelector('.markdown')?.innerText.includes('Line 199.')")
    assert browser.js("document.querySelector('.log').scrollTop") == 0
    browser.click("[name=to-end]")
    browser.wait(end)


def test_it_asks_for_a_key_where_keys_are_on(browser: Browser):
    with until_the_end(Served("--api-keys=sk-test-1")) as served:
        browser.open(f"http://127.0.0.1:{served.port}/")
        browser.wait("document.querySelector('dialog[open]')")
        assert "API key" in browser.text("dialog")
        browser.fill("dialog input", "sk-test-1")
        browser.key("Enter", "\r")
        browser.wait("!document.querySelector('dialog')")
        browser.wait("[...document.querySelectorAll('option')].some((one) => one.value === 'antiphon-demo')")
        assert browser.text("[name=key]") == "API key: set"
        ask(browser, QUESTION)
        finished(browser)
        assert browser.js("sessionStorage.getItem('antiphon-key')") == "sk-test-1"
        assert browser.js("Object.values(localStorage).every((one) => !one.includes('sk-test'))")
        # This server keeps no prompts and tokens: the buttons tell how to start one that does.
        browser.click(".turn.assistant .facts a")
        for name in ("replay", "fork"):
            browser.click(f"button[name={name}]")
            browser.wait("document.querySelector('main').innerText.includes('antiphon serve --record-content-mb')")


def test_keys_open_and_search(console: Served, browser: Browser):
    open_chat(browser, console)
    browser.js("dispatchEvent(new KeyboardEvent('keydown', {key: 'k', ctrlKey: true, cancelable: true})), null")
    assert browser.js("document.activeElement.type") == "search"
    browser.js("dispatchEvent(new KeyboardEvent('keydown', {key: ',', ctrlKey: true, cancelable: true})), null")
    browser.wait("document.querySelector('.drawer')")
    browser.click("[name=help]")
    browser.wait("document.querySelector('dialog.help[open]')")
    assert "Shift+Enter" in browser.text("dialog.help")


def test_one_can_chat_on_a_phone(console: Served, browser: Browser):
    browser.size(390, 844, phone=True)
    open_chat(browser, console)
    plant(browser, pieces("A table:\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```\n" + "long " * 60 + "\n```\n"))
    ask(browser, "hello")
    finished(browser)
    assert browser.js("document.documentElement.scrollWidth") <= 390, "the page itself does not scroll sideways"
    assert browser.js(f"{LAST}.scrollWidth") <= 390
    assert not browser.js("document.querySelector('.rail').checkVisibility({visibilityProperty: true})")
    browser.click("[name=menu]")
    browser.wait("document.querySelector('.rail').checkVisibility({visibilityProperty: true})")
    browser.wait("document.querySelector('.rail').getBoundingClientRect().left === 0")
    browser.click(".conversations a.button")
    browser.wait("!document.querySelector('.rail').checkVisibility({visibilityProperty: true})")
    browser.click("[name=settings]")
    browser.wait("document.querySelector('.drawer').getBoundingClientRect().width <= 390")
