"""What the chat page makes of an answer: Markdown while it grows, code, formulas, thinking, and nothing that runs."""

import json
import random

import pytest

from tests.system.console.browser import Browser
from tests.system.console.chat_page import ask, finished, open_chat, pieces, plant
from tests.system.served import Served

pytestmark = pytest.mark.system
ANSWER = r"""# A heading

Some **bold** and `code`; it costs $5 or $6. See https://example.org/page.

An identity: $e^{i\pi} + 1 = 0$, or \(a < b\), and

$$\int_0^1 x\,dx$$

\[
\frac{1}{2}
\]

| name | value |
|:-----|------:|
| a    |  1.50 |

```python
def double(n: int) -> int:
    return 2 * n
```

1. first
2. second
   - nested
"""
HOSTILE = """<script>window.hacked = 1</script> <img src=x onerror="window.hacked = 1">

[click](javascript:window.hacked=1) ![far](http://192.0.2.1/pixel.png) [far](http://192.0.2.1/)

<iframe src="http://192.0.2.1/"></iframe><style>body { display: none }</style>

`<b>` $\\href{javascript:alert(1)}{x}$ | <svg onload=alert(1)>
"""
IMPORTS = "Promise.all([import('./console/chat/markdown.js'), import('./console/chat/drawing.js')])"


def test_markdown_code_tables_and_formulas(console: Served, browser: Browser):
    open_chat(browser, console)
    plant(browser, pieces(ANSWER, 3))
    ask(browser, "Show me.")
    finished(browser)
    browser.wait("document.querySelectorAll('.markdown math').length === 4")
    inside = "document.querySelector('.turn.assistant .markdown')"
    assert browser.js(f"{inside}.querySelector('h1').innerText") == "A heading"
    assert "$5 or $6" in browser.text(".markdown")
    assert (
        browser.js(f"{inside}.querySelector('a').target + {inside}.querySelector('a').rel")
        == "_blanknoopener noreferrer"
    )
    assert browser.js(f"getComputedStyle({inside}.querySelector('td.right')).textAlign") == "right"
    assert browser.js(f"{inside}.querySelector('.hljs-keyword').innerText") == "def"
    assert browser.js(f"{inside}.querySelectorAll('ol > li > ul > li').length") == 1
    assert browser.text(".code-head span") == "python"
    browser.js("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }, null")
    browser.click("[name=copy-code]")
    browser.wait("document.querySelector('[name=copy-code]').innerText === 'Copied'")
    assert browser.js("copied") == "def double(n: int) -> int:\n    return 2 * n\n"
    browser.click(".turn.assistant [name=copy]")
    browser.wait(f"copied === {json.dumps(ANSWER)}")


def test_an_answer_runs_nothing_and_asks_no_other_host(console: Served, browser: Browser):
    open_chat(browser, console)
    plant(browser, pieces(HOSTILE, 7))
    ask(browser, "Show me.")
    finished(browser)
    browser.wait("document.querySelector('.markdown .math')")
    assert browser.js("window.hacked") is None
    assert (
        browser.js("document.querySelectorAll('.markdown :is(script, img, iframe, style, svg, [onerror])').length") == 0
    )
    links = browser.js("[...document.querySelectorAll('.markdown a')].map((one) => one.href)")
    assert links[0] == "http://192.0.2.1/pixel.png", "an image elsewhere is a link"
    assert all(link.startswith("http://192.0.2.1/") for link in links)
    assert not any("192.0.2.1" in url for url in browser.requested)


def test_thinking_is_apart_from_the_answer(console: Served, browser: Browser):
    open_chat(browser, console)
    plant(browser, [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, *pieces("It is 19.")])
    browser.js("window.holdAt = 2, null")
    ask(browser, "What is it?")
    browser.wait("document.querySelector('.thinking[open] .markdown')?.innerText === 'Let me see.'")
    browser.js("window.release(), null")
    finished(browser)
    assert browser.js("document.querySelector('.thinking').open") is False, "it closes when the answer begins"
    assert browser.text(".thinking summary").startswith("Thought")
    assert browser.js("[...document.querySelectorAll('.turn.assistant > .markdown')].map((one) => one.innerText)") == [
        "It is 19."
    ]
    # The words of the model's thinking are not sent again; nor are they where a server leaves their marks in the text.
    plant(browser, pieces("<think>\nHm.\n</think>\n\nYes."))
    ask(browser, "Sure?")
    finished(browser, 2)
    assert browser.js("document.querySelectorAll('.thinking').length") == 2
    ask(browser, "Really?")
    finished(browser, 3)
    sent = [(one["role"], one["content"]) for one in browser.js("bodies.at(-1).messages")]
    assert sent == [
        ("user", "What is it?"),
        ("assistant", "It is 19."),
        ("user", "Sure?"),
        ("assistant", "Yes."),
        ("user", "Really?"),
    ]


def document(chance: random.Random) -> str:
    """A text with blocks of all kinds, some of them long."""

    def words(count: int) -> str:
        return " ".join(
            chance.choice(["alpha", "**beta**", "`g`", "delta $x^2$", "<e>", "[f](g)"]) for _ in range(count)
        )

    def block() -> str:
        long = chance.choice([2, 120])
        kind = chance.randrange(7)
        if kind == 0:
            return words(30)
        if kind == 1:
            return "\n".join(f"{chance.choice(['-', '-', '  -'])} {words(4)}" for _ in range(long))
        if kind == 2:
            return "\n\n".join(f"{number}. {words(5)}" for number in range(3, 3 + long))
        if kind == 3:
            return "| a | b |\n|---|--:|\n" + "\n".join(f"| {words(2)} | {number} |" for number in range(long))
        if kind == 4:
            return "```py\n" + "\n".join(f"x = {number}  # {words(2)}" for number in range(long)) + "\n```"
        return f"## {words(3)}" if kind == 5 else "> " + words(12)

    return "\n\n".join(block() for _ in range(8)) + "\n"


def test_growing_text_is_drawn_as_the_whole_text_would_be(console: Served, browser: Browser):
    browser.open(f"http://127.0.0.1:{console.port}/")
    for seed in range(12):
        chance = random.Random(seed)
        text = document(chance)
        cuts = sorted({*(chance.randrange(len(text)) for _ in range(60)), len(text)})
        found = browser.js(
            f"{IMPORTS}.then(([{{ language }}, {{ Drawing }}]) => {{ const text = {json.dumps(text)};"
            "const root = document.createElement('div'), whole = document.createElement('div');"
            "const drawing = new Drawing(root, language), plain = (one) => one.textContent.replace(/\\s+/g, '');"
            f"for (const cut of {cuts}) {{ drawing.text = text.slice(0, cut); drawing.draw();"
            "  whole.replaceChildren(...language.nodes(language.parse(drawing.text, {}), {}));"
            "  if (plain(root) !== plain(whole)) return [cut, plain(root).slice(-80), plain(whole).slice(-80)]; }"
            "drawing.finish(); return root.innerHTML === whole.innerHTML ? null : 'the end differs'; })"
        )
        assert found is None, (seed, found)


@pytest.mark.parametrize("kind", ["prose", "list", "table", "code"])
def test_the_work_for_a_long_answer_grows_with_its_length_alone(console: Served, browser: Browser, kind: str):
    """Counted in characters that are parsed: an answer of 10,000 tokens that is drawn 500 times."""
    browser.open(f"http://127.0.0.1:{console.port}/")
    text = {
        "prose": "\n\n".join("word " * 40 for _ in range(250)),
        "list": "\n".join("- " + "word " * 10 for _ in range(1000)),
        "table": "| a | b |\n|---|---|\n" + "\n".join(f"| {number} | word word |" for number in range(2000)),
        "code": "```\n" + "\n".join("x = 1 + 2 + 3 + 4 + 5" for _ in range(2000)),
    }[kind]
    parsed = browser.js(
        f"{IMPORTS}.then(([{{ language }}, {{ Drawing }}]) => {{ const text = {json.dumps(text)};"
        "let parsed = 0; const counting = { ...language, parse: (...all) => { parsed += all[0].length;"
        "return language.parse(...all); } };"
        "const drawing = new Drawing(document.createElement('div'), counting);"
        "for (let part = 1; part <= 500; part++) {"
        "drawing.text = text.slice(0, part * text.length / 500); drawing.draw(); }"
        "return parsed; })"
    )
    # Each drawing reads its end, of at most a long block, a few times.
    assert parsed < 3 * len(text) + 500 * 3 * 1500 / 2
