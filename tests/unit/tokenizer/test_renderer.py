"""S-05: hostile templates in a real worker process are stopped at their limits, and the next request is served."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from antiphon.services.tokenizer.renderer import Renderer, WorkerPool
from antiphon.shared import limits
from antiphon.shared.errors import ServiceError

MESSAGES = [{"role": "user", "content": "hello"}]
# What the first message says decides what the template does.
SWITCH = "{%% if messages[0].content == 'attack' %%}%s{%% else %%}{{ bos_token }}{{ messages[0].content }}{%% endif %%}"
CPU = (
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(9) %}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% set ns = namespace(x=9) %}{% for i in range(9) %}{% set ns.x = ns.x ** ns.x %}{% endfor %}{{ ns.x }}",
    "{{ range(99999) | map('string') | list | batch(2) | list | sort | join | wordwrap(1) }}"
    "{% for a in range(99999) %}{% for b in range(9999) %}{% set x = [b, a] | sort %}{% endfor %}{% endfor %}",
)
MEMORY = (
    "{{ ('a' * 999999999) | length }}",
    "{% set ns = namespace(x='aaaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{{ '%0999999999d' % 1 }}",
    "{{ 'x'.ljust(999999999) }}",
)
OUTPUT = (
    "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}a{% endfor %}{% endfor %}",
)
Make = Callable[..., WorkerPool]


@pytest.fixture
async def pool() -> AsyncIterator[Make]:
    pools: list[WorkerPool] = []

    def make(template: str, **options: Any) -> WorkerPool:
        pools.append(WorkerPool(template, {"bos_token": "<s>"}, **{"wall_s": 60.0, **options}))
        return pools[-1]

    yield make
    for made in pools:
        await made.close()


def worker_pids() -> set[int]:
    found = subprocess.run(["pgrep", "-P", str(os.getpid()), "-f", "render_worker"], capture_output=True, text=True)
    return set(map(int, found.stdout.split()))


async def test_a_worker_renders_and_stays_for_the_next_request(pool: Make) -> None:
    renderer = pool("{{ bos_token }}{{ messages[0].content }}{{ add_generation_prompt }}")
    before = worker_pids()
    assert await renderer.render(MESSAGES, True) == "<s>helloTrue"
    first = worker_pids() - before
    assert await renderer.render(MESSAGES, False) == "<s>helloFalse"
    assert worker_pids() - before == first
    assert len(first) == 1


@pytest.mark.matrix("S-05")
@pytest.mark.parametrize("attack", [*CPU, *MEMORY, *OUTPUT])
async def test_an_attack_is_stopped_at_its_limit_and_the_next_request_is_served(pool: Make, attack: str) -> None:
    renderer = pool(SWITCH % attack, workers_max=1, wall_s=limits.TEMPLATE_WALL_S)
    assert await renderer.render(MESSAGES, True) == "<s>hello"
    with pytest.raises(ServiceError, match=r"chat template|longer than") as stopped:
        await renderer.render([{"role": "user", "content": "attack"}], True)
    assert (stopped.value.code, stopped.value.param) == ("invalid_value", "messages")
    assert await renderer.render(MESSAGES, True) == "<s>hello"


@pytest.mark.matrix("S-05")
async def test_others_do_not_wait_for_an_attack(pool: Make) -> None:
    renderer = pool(SWITCH % CPU[0], workers_max=2)
    attack = asyncio.create_task(renderer.render([{"role": "user", "content": "attack"}], True))
    for _ in range(20):
        assert await renderer.render(MESSAGES, True) == "<s>hello"
        assert not attack.done()
    attack.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attack
    assert await renderer.render(MESSAGES, True) == "<s>hello"


async def test_a_template_that_hangs_while_it_is_compiled_is_stopped(pool: Make) -> None:
    renderer = pool("{{ 'a' * 9999999999 }}")
    for _ in range(2):
        with pytest.raises(ServiceError, match="chat template"):
            await renderer.render(MESSAGES, True)


async def test_an_invalid_template_is_explained_to_every_request(pool: Make, caplog: pytest.LogCaptureFixture) -> None:
    renderer = pool("{% for %}")
    await renderer.warm()
    assert "not valid Jinja" in caplog.text
    for _ in range(2):
        with pytest.raises(ServiceError, match="not valid Jinja"):
            await renderer.render(MESSAGES, True)


def wait_for_end(pid: int) -> None:
    """Waits for the end of a child process. The event loop does not run meanwhile, so it has not seen the end yet."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def test_a_worker_that_died_in_between_is_replaced_without_a_failed_request(pool: Make) -> None:
    renderer = pool("{{ messages[0].content }}")
    before = worker_pids()
    await renderer.warm()
    (worker,) = worker_pids() - before
    os.kill(worker, signal.SIGKILL)
    wait_for_end(worker)
    assert await renderer.render(MESSAGES, True) == "hello"
    assert renderer.killed == 0


async def test_closing_leaves_no_process(pool: Make) -> None:
    before = worker_pids()
    renderer = pool("{{ messages[0].content }}")
    await asyncio.gather(*(renderer.render(MESSAGES, True) for _ in range(4)))
    assert 1 <= len(worker_pids() - before) <= 2
    await renderer.close()
    assert worker_pids() == before


async def test_a_worker_sees_no_environment(pool: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "1")
    before = worker_pids()
    await pool("x").warm()
    (worker,) = worker_pids() - before
    with open(f"/proc/{worker}/environ", "rb") as environ:  # noqa: ASYNC230, PTH123 - a file of the kernel
        names = {item.partition(b"=")[0] for item in environ.read().split(b"\0") if item}
    assert names <= {b"PYTHONPATH", b"LC_CTYPE"}


async def test_the_longest_conversation_passes(pool: Make) -> None:
    text = "é" * (limits.TEMPLATE_OUTPUT_CHARS_MAX - 1)
    rendered = await pool("{{ messages[0].content }}").render([{"role": "user", "content": text}], True)
    assert rendered == text


async def test_a_model_without_a_template_says_what_to_do() -> None:
    with pytest.raises(ServiceError, match=r"--chat-template.*/v1/completions") as missing:
        await Renderer().render(MESSAGES, True)
    assert missing.value.param == "messages"


def test_a_worker_imports_jinja_and_msgspec_and_little_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import antiphon.services.tokenizer.render_worker;"
        "print(*sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert set(found) <= {"antiphon", "jinja2", "markupsafe", "msgspec", "typing_extensions"}


async def test_a_conversation_with_tools_has_its_own_template_variables_and_an_open_end(pool: Make) -> None:
    template = "{{ mood }} {{ messages[0].content }}</s>"
    renderer = pool(template, tool_template="{{ tools[0].number }} {{ messages[0].calls | tojson }}")
    assert await renderer.render(MESSAGES, False, {"mood": "good"}) == "good hello</s>"
    assert await renderer.render(MESSAGES, False, {"mood": 1}, continue_final_message=True) == "1 hello"
    huge = 10**40
    messages = [{"role": "user", "content": "", "calls": [{"a": 1.0}]}]
    assert await renderer.render(messages, False, {"tools": [{"number": huge}]}) == f'{huge} [{{"a": 1.0}}]'
