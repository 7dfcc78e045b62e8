"""The key file: what it may hold, what each mistake is answered with, and that it is read again."""

import asyncio
import hashlib
import json
import os
from pathlib import Path

import pytest

from antiphon.services.gateway.edge.access import key_file
from antiphon.services.gateway.edge.access.key_file import KeyFile
from antiphon.services.gateway.edge.http.auth import ApiKeys
from antiphon.shared.errors import ServiceError
from antiphon.shared.flags import SettingsError
from antiphon.shared.security.api_keys import ApiKey, keys_of_text, listed_keys

FULL = """
[[keys]]
name = "team-a"
key = ["sk-one", "sk-two"]
models = ["org/toy"]
scopes = ["inference", "admin"]
requests-per-minute = 60
tokens_per_minute = 1000
concurrent-requests = 2
weight = 2.5
priority = -1

[[keys]]
name = "team_b"
sha256 = "{digest}"
""".format(digest=hashlib.sha256(b"sk-three").hexdigest())


def read(text: str, *, is_json: bool = False) -> list[ApiKey]:
    return keys_of_text(text, is_json=is_json, source="F")


def bearer(value: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {value}".encode()}


def test_a_file_says_what_each_key_may_do():
    team_a, team_b = read(FULL)
    assert (team_a.name, team_a.models, team_a.scopes) == ("team-a", {"org/toy"}, {"inference", "admin"})
    assert (team_a.requests_per_minute, team_a.tokens_per_minute, team_a.concurrent_requests) == (60, 1000, 2)
    assert (team_a.weight, team_a.priority) == (2.5, -1)
    assert (team_b.models, team_b.scopes, team_b.is_limited) == (None, {"inference"}, False)


def test_json_says_the_same():
    assert read(json.dumps({"keys": [{"name": "a", "key": "x"}]}), is_json=True)[0].name == "a"


def test_a_file_key_opens_by_any_of_its_values_and_by_its_digest():
    keys = ApiKeys("", read(FULL))
    assert [keys.check("/v1/models", bearer(value)).name for value in ("sk-one", "sk-two", "sk-three")] == [
        "team-a",
        "team-a",
        "team_b",
    ]
    for wrong in ("sk-four", hashlib.sha256(b"sk-three").hexdigest()):
        with pytest.raises(ServiceError, match="Incorrect"):
            keys.check("/v1/models", bearer(wrong))


def test_metrics_need_the_scope_admin_and_documents_any_key():
    keys = ApiKeys("all", read(FULL))
    for path in ("/metrics", "/admin/x"):
        assert keys.check(path, bearer("sk-one")).name == "team-a"
        assert keys.check(path, bearer("all")) == listed_keys("all")[0]
        with pytest.raises(ServiceError) as raised:
            keys.check(path, bearer("sk-three"))
        assert (raised.value.status, raised.value.code) == (403, "permission_denied")
    assert keys.check("/openapi.json", bearer("sk-three")).name == "team_b"


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ('key = "x"', "name"),
        ('name = "a"', "'sha256'"),
        ('name = "a b"\nkey = "x"', "name"),
        ('name = "a.b"\nkey = "x"', "name"),
        ('name = "anonymous"\nkey = "x"', "another"),
        ('name = "launcher"\nkey = "x"', "another"),
        ('name = "a"\nkey = ""', "length"),
        ('name = "a"\nkey = ["x", ""]', "length"),
        ('name = "a"\nsha256 = "abc"', "sha256"),
        ('name = "a"\nkey = "x"\nscopes = []', "scopes"),
        ('name = "a"\nkey = "x"\nscopes = ["root"]', "'inference', 'admin'"),
        ('name = "a"\nkey = "x"\nrequests-per-minute = 0', "requests_per_minute"),
        ('name = "a"\nkey = "x"\nweight = 0', "weight"),
        ('name = "a"\nkey = "x"\npriority = 2147483648', "priority"),
        ('name = "a"\nkey = "x"\nrate = 1', "rate"),
        ('name = "a"\nkey = "sk-secret', "not valid TOML"),
        ('name = "a"\nkey = "sk-secret"\n[[keys]]\nname = "a"\nkey = "y"', "two keys"),
        ('name = "a"\nkey = "sk-secret"\n[[keys]]\nname = "b"\nkey = "sk-secret"', "same value"),
    ],
)
def test_a_mistake_is_named_without_the_value_of_a_key(entry: str, said: str):
    with pytest.raises(SettingsError) as raised:
        read("[[keys]]\n" + entry)
    assert str(raised.value).startswith("F: ")
    assert said in str(raised.value)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "keys = []", "keys = 3", "[[key]]\nname = 'a'"])
def test_a_file_without_keys_is_refused(text: str):
    with pytest.raises(SettingsError):
        read(text)


def test_listed_keys_and_file_keys_may_not_collide():
    for listed in ("sk-one", "a,sk-three"):
        with pytest.raises(SettingsError, match="--api-keys"):
            ApiKeys(listed, read(FULL))


def test_a_listed_key_keeps_its_name_when_others_come_and_go():
    names = [key.name for key in listed_keys(" a, ,b,a")]
    assert names == [f"key-{hashlib.sha256(value).hexdigest()[:16]}" for value in (b"a", b"b")]
    assert [key.name for key in listed_keys("b")] == names[1:]
    assert ApiKeys("b,c,a", []).named(names[0], "/v1/files").name == names[0]


def test_the_launchers_key_collides_with_no_name_of_a_file():
    keys = ApiKeys("", read('[[keys]]\nname = "key-1"\nkey = "x"'), "own")
    assert [keys.check("/v1/models", bearer(value)).name for value in ("x", "own")] == ["key-1", "launcher"]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"--api-keys-file: .*missing.toml cannot be read"):
        KeyFile(str(tmp_path / "missing.toml")).read()


async def test_a_changed_file_is_used_and_an_invalid_one_changes_nothing(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(key_file, "POLL_S", 0.01)
    path = tmp_path / "keys.toml"
    path.write_text(FULL)
    file = KeyFile(str(path))
    keys = ApiKeys("", file.read())
    assert "can be read by other users" in caplog.text
    watching = asyncio.create_task(file.watch(keys.replace))

    async def until(condition) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    def opens(value: str) -> bool:
        try:
            keys.check("/v1/models", bearer(value))
        except ServiceError:
            return False
        return True

    replacement = tmp_path / "new"
    replacement.write_text('[[keys]]\nname = "c"\nkey = "sk-new"')
    os.replace(replacement, path)  # noqa: PTH105 - as configuration tools replace files
    await until(lambda: opens("sk-new"))
    assert not opens("sk-one")
    path.write_text("[[keys]]\nname = 3")
    await until(lambda: "stay in use" in caplog.text)
    path.unlink()
    await until(lambda: "cannot be read" in caplog.text)
    assert opens("sk-new")
    assert "sk-new" not in caplog.text
    watching.cancel()
