"""The grammar of subjects, and which pattern hears which subject."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.shared.limits import MODEL_TOKEN_CHARS_MAX, PROTOCOL_VERSION
from antiphon.shared.subjects import Subjects, check_id, model_token, new_instance_id, safe_token
from tests.support.memory import matches

TOKEN = re.compile(r"[A-Za-z0-9_-]+")
TOKENS = st.from_regex(r"[a-c]{1,2}", fullmatch=True)


@pytest.mark.matrix("B-17")
def test_every_subject_starts_with_namespace_and_major_version():
    subjects = Subjects("prod")
    for subject in (
        subjects.tokenize("a model"),
        subjects.engine_control("e1", "b1"),
        subjects.detokenizer_control("d1", "b1"),
        subjects.detokenizer_tokens("d1", "b1"),
        subjects.gateway_text("g1", "b1"),
        subjects.heartbeat("engine", "e1"),
        subjects.inbox("gateway", "g1"),
    ):
        assert subject.startswith(f"prod.v{PROTOCOL_VERSION}.")
        assert all(TOKEN.fullmatch(token) for token in subject.split("."))
        assert matches(subjects.everything(), subject)
        assert not matches(Subjects("test").everything(), subject)


def test_a_stateful_service_has_another_subject_in_each_incarnation():
    subjects = Subjects()
    for build in (subjects.engine_control, subjects.detokenizer_control, subjects.detokenizer_tokens):
        assert build("one", "b1") != build("one", "b2")
        assert build("one", "b1") != build("two", "b1")


def test_heartbeats_are_heard_by_service_or_all_together():
    subjects = Subjects()
    assert matches(subjects.heartbeats("engine"), subjects.heartbeat("engine", "e1"))
    assert not matches(subjects.heartbeats("engine"), subjects.heartbeat("gateway", "g1"))
    assert matches(subjects.heartbeats(), subjects.heartbeat("gateway", "g1"))


@given(st.text(max_size=60), st.integers(16, 64))
def test_any_text_becomes_one_token_within_the_bound_that_is_stable(text, bound):
    token = safe_token(text, bound)
    assert re.fullmatch(r"[A-Za-z0-9_-]+", token)
    assert len(token) <= bound
    assert token == safe_token(text, bound)


NAMES = st.text("ab-_./é", max_size=6) | st.text("a", min_size=38, max_size=44)


@given(st.lists(NAMES, min_size=2, max_size=12, unique=True))
def test_two_model_names_never_share_a_token(names):
    # A token may itself be a model's name.
    names = list(dict.fromkeys([*names, *map(model_token, names)]))
    assert len(set(map(model_token, names))) == len(names)


@pytest.mark.parametrize("name", ["antiphon-demo", "Qwen2_0", "x" * MODEL_TOKEN_CHARS_MAX])
def test_a_safe_name_stays_as_it_is(name):
    assert model_token(name) == name
    assert Subjects().tokenize(name) == f"antiphon.v{PROTOCOL_VERSION}.tok.{name}.req"


def test_an_unsafe_name_can_still_be_read_in_its_token():
    assert re.fullmatch(r"org-model-v1-[0-9a-f]{8}", model_token("org/model.v1"))
    assert len(model_token("x" * 100)) == MODEL_TOKEN_CHARS_MAX


def test_boots_differ():
    instance_ids = {new_instance_id() for _ in range(200)}
    assert len(instance_ids) == 200
    assert all(re.fullmatch("[0-9a-f]{8}", instance_id) for instance_id in instance_ids)


@pytest.mark.parametrize("member_id", ["", "a.b", "a b", "*", ">", "a\n", "x" * 65, "é"])
def test_an_id_that_cannot_stand_in_a_subject_is_refused(member_id):
    with pytest.raises(ValueError, match="service id"):
        check_id(member_id)


@pytest.mark.parametrize("member_id", ["a", "engine-host_1", "x" * 64])
def test_an_id_of_letters_digits_and_dashes_is_accepted(member_id):
    assert check_id(member_id) == member_id


@pytest.mark.parametrize("namespace", ["", "a.b", "a b", ">"])
def test_a_malformed_namespace_is_a_broken_invariant(namespace):
    with pytest.raises(AssertionError):
        Subjects(namespace)


@given(st.lists(TOKENS, min_size=1, max_size=5), st.data())
def test_replacing_a_token_by_a_star_or_the_rest_by_an_arrow_keeps_the_match(tokens, data):
    subject, index = ".".join(tokens), data.draw(st.integers(0, len(tokens) - 1))
    starred = [*tokens[:index], "*", *tokens[index + 1 :]]
    assert matches(".".join(starred), subject)
    assert matches(".".join([*tokens[:index], ">"]), subject)
    assert not matches(f"{subject}.>", subject)
    assert not matches(f"{subject}.*", subject)


@given(st.lists(TOKENS, max_size=5), st.lists(TOKENS, max_size=5))
def test_without_wildcards_only_the_same_subject_matches(one, two):
    assert matches(".".join(one), ".".join(two)) == (one == two)
