"""The screenshots of the chat, each in both colours and two widths. No fixtures. Called by `screenshots`."""

from collections.abc import Callable
from pathlib import Path

from tests.system.console.browser import Browser
from tests.system.console.chat_page import ask, finished, open_chat, pieces, plant, settings
from tests.system.served import Served

LOOKS = tuple((name, scheme) for name in ("", "-phone") for scheme in ("light", "dark"))
SIZES = {"": (1280, 800), "-phone": (390, 844)}
THOUGHT = "The user wants the first Fibonacci numbers and how to compute them. A loop is better than recursion."
ANSWER = r"""The **Fibonacci numbers** follow $F_n = F_{n-1} + F_{n-2}$, and grow like

$$F_n \approx \frac{\varphi^n}{\sqrt{5}}, \qquad \varphi = \frac{1 + \sqrt{5}}{2}$$

A loop computes them in linear time:

```python
def fibonacci(n: int) -> int:
    a, b = 0, 1
    for _ in range(n):
        a, b = b, a + b
    return a
```

| n | number | ratio to the one before |
|--:|-------:|------:|
| 8 |     21 | 1.615 |
| 9 |     34 | 1.619 |
"""


def take(browser: Browser, served: Served, folder: Path, save: Callable[[Browser, Path], None]) -> None:
    """Writes the images of the chat into `folder`, by `save`."""
    for size, scheme in LOOKS:
        browser.size(*SIZES[size], phone=bool(size))
        browser.scheme(scheme)
        for name, show in SCENES.items():
            browser.open("about:blank")
            show(browser, served)
            # Without the blinking cursor, and with all that is drawn a moment later.
            browser.js("document.activeElement.blur(), new Promise((done) => setTimeout(done, 400))")
            save(browser, folder / f"{name}{size}-{scheme}.png")


def empty(browser: Browser, served: Served) -> None:
    """Nothing was asked yet."""
    open_chat(browser, served)


def answer(browser: Browser, served: Served) -> None:
    """An answer with all that Markdown has, and thinking."""
    open_chat(browser, served)
    plant(browser, [{"reasoning_content": THOUGHT}, *pieces(ANSWER, 4)])
    ask(browser, "How do I compute Fibonacci numbers?")
    finished(browser)
    browser.wait("document.querySelectorAll('.markdown math').length > 1")


def settings_of(browser: Browser, served: Served) -> None:
    """The drawer beside an answer."""
    answer(browser, served)
    settings(browser)


def tokens(browser: Browser, served: Served) -> None:
    """What else the model might have said."""
    open_chat(browser, served)
    settings(browser, temperature="0.9", seed="3", max_tokens="60")
    browser.click("[name=close-settings]")
    ask(browser, "What is 12 + 7?")
    finished(browser)
    browser.click(".turn.assistant [name=tokens]")
    browser.wait("document.querySelector('.token')")
    browser.hover(".turn.assistant [data-at='3']")
    browser.wait("document.querySelector('.probabilities strong')")


def failed(browser: Browser, served: Served) -> None:
    """A turn that was refused."""
    open_chat(browser, served)
    settings(browser, more='{"logit_bias": "sea"}')
    browser.click("[name=close-settings]")
    ask(browser, "Tell me everything about the sea.")
    browser.wait("document.querySelector('.turn.assistant [role=alert]')")
    browser.js("localStorage.removeItem('antiphon-chat')")


SCENES: dict[str, Callable[[Browser, Served], None]] = {
    "chat-empty": empty,
    "chat-answer": answer,
    "chat-settings": settings_of,
    "chat-tokens": tokens,
    "chat-failed": failed,
}
