"""Records the console while an engine is killed, the overview and the chat at once: `make kill-picture`.

It starts the real system with two engines and the demo model, lets other clients work, asks for a long answer in the
chat, kills the engine that computes it (SIGKILL), and writes docs/screenshots/kill.webp from screenshots of both pages.
The answer is computed once more without a kill, and compared: the last picture says that the two are equal.
"""

import io
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from tests.system.console.browser import Browser, find_chromium
from tests.system.console.chat_page import ask, open_chat, settings
from tests.system.console.pages import address
from tests.system.served import ROOT, Served, fetch, until_the_end, wait_until

PICTURE = ROOT / "docs" / "screenshots" / "kill.webp"
FLAGS = ("--engines=2", "--gateways=1", "--max-num-seqs=160", "--kv-cache-memory-gb=0.3")
QUESTION = "Tell me a story."
MORE = {"ignore_eos": True, "seed": 7, "temperature": 0.8}
TOKENS, KILLED_AT, OTHERS = 1000, 300, 249
"""The tokens of the answer, after how many of them its engine is killed, and the other clients."""
WHOLE_S, FRAME_S, LAST_S = 120.0, 0.5, 3.0
RAIL, WIDTH = 264, 1280
OVERVIEW, CHAT, CAPTION = (56, 408), (0, 420), 40
"""The parts of the two pages that are shown, from top to bottom, and the height of the caption below, pixels."""


def main() -> int:
    """Records, compares and writes. Returns the exit status; raises SystemExit if the answers differ."""
    binary = find_chromium()
    if binary is None:
        return 78
    profiles = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with until_the_end(Served(*FLAGS)) as served, profiles as folder:
        browsers = [Browser(binary, Path(folder) / name, "--hide-scrollbars") for name in ("overview", "chat")]
        try:
            frames = _record(served, *browsers)
        finally:
            for browser in browsers:
                browser.close()
    frames[0].save(
        PICTURE, save_all=True, append_images=frames[1:], duration=[*[int(1000 * FRAME_S)] * (len(frames) - 1), 6000],
        loop=0, quality=45, method=4, minimize_size=True,
    )  # fmt: skip
    return 0


def _record(served: Served, overview: Browser, chat: Browser) -> list[Image.Image]:
    for browser, height in ((overview, 800), (chat, CHAT[1])):
        browser.size(WIDTH, height)
        browser.scheme("light")
    overview.open(address(served, "overview"))
    overview.wait("document.querySelectorAll('.box').length > 4")
    open_chat(chat, served)
    settings(chat, max_tokens=str(TOKENS), more=json.dumps(MORE))
    chat.click("[name=close-settings]")
    frames: list[Image.Image] = []
    with _load(served):
        started = time.monotonic()
        ask(chat, QUESTION)
        killed = ""
        done_s = 0.0
        while (now := time.monotonic() - started) < WHOLE_S and not (done_s and now > done_s + LAST_S):
            if not killed and (killed := _engine(served)):
                os.kill(served.pids()[killed], signal.SIGKILL)
            told = f"{now:4.0f} s    " + (f"kill -9 {killed}" if killed else f"two engines, {OTHERS + 1} clients")
            frames.append(_frame(overview, chat, told))
            if not done_s and chat.js("!!document.querySelector('.turn.assistant .facts a')"):
                done_s = now
            time.sleep(max(0.0, started + FRAME_S * len(frames) - time.monotonic()))
        if not killed or not done_s:
            raise SystemExit(f"killed {killed!r}, answer done after {done_s} s")
    told = _compared(served, chat, killed)
    frames.append(_frame(overview, chat, told))
    return frames


def _engine(served: Served) -> str:
    """Returns the name of the engine to kill, or "" as long as the answer is too short."""
    found = fetch(served, "GET", "/v1/requests?state=running&sort=slowest").json["data"]
    ripe = (one for one in found if one["max_tokens"] == TOKENS and one["completion_tokens"] >= KILLED_AT)
    return next((one["engines"][-1] for one in ripe), "")


def _compared(served: Served, chat: Browser, killed: str) -> str:
    """Returns what the last picture says. Raises SystemExit if the answer is another one than without a kill."""
    chat.js("navigator.clipboard.writeText = (text) => { window.copied = text; return Promise.resolve(); }, null")
    chat.click(".turn.assistant [name=copy]")
    chat.wait("window.copied")
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": TOKENS, **MORE}
    undisturbed = fetch(served, "POST", "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    if chat.js("copied") != undisturbed:
        raise SystemExit("the answer differs from the one that nothing disturbed")
    return f"kill -9 {killed}: the same {len(undisturbed):,} characters as without it"


@contextmanager
def _load(served: Served) -> Iterator[None]:
    """Other clients, each with one answer after the other, until the block ends."""
    over = threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            body = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "seed": number}
            fetch(served, "POST", "/v1/completions", body)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(OTHERS)]
    for thread in threads:
        thread.start()
    wait_until(lambda: bool(fetch(served, "GET", "/v1/requests?state=running").json["data"]), 60)
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _frame(overview: Browser, chat: Browser, told: str) -> Image.Image:
    parts = [_part(overview, *OVERVIEW), _part(chat, *CHAT)]
    whole = Image.new("RGB", (WIDTH - RAIL, sum(part.height for part in parts) + 1 + CAPTION), "#16202e")
    top = 0
    for part in parts:
        whole.paste(part, (0, top))
        top += part.height + 1  # a line between the pages
    ImageDraw.Draw(whole).text((16, top + 9), told, fill="#ffffff", font=ImageFont.load_default(18))
    return whole


def _part(browser: Browser, top: int, bottom: int) -> Image.Image:
    with tempfile.NamedTemporaryFile(suffix=".png") as file:
        browser.screenshot(Path(file.name))
        return Image.open(io.BytesIO(Path(file.name).read_bytes())).convert("RGB").crop((RAIL, top, WIDTH, bottom))


if __name__ == "__main__":
    sys.exit(main())
