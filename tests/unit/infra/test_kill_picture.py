"""The picture of the README: what it shows was recorded, and the recording in it gives the same file again."""

from xml.etree import ElementTree

import pytest

from tests.system.console.kill_picture import COLUMNS, HEIGHT, Piece, Recording, draw, read
from tests.system.console.recorded_kill import PICTURE

SVG = "{http://www.w3.org/2000/svg}"
SIZE_MAX = 60 * 1024


@pytest.fixture
def picture() -> str:
    return PICTURE.read_text(encoding="utf-8")


def test_it_shows_a_stream_that_moved_and_kept_its_text(picture: str) -> None:
    assert read(picture).is_proof()


def test_it_is_drawn_from_the_recording_in_it(picture: str) -> None:
    assert draw(read(picture)) == picture


def test_it_is_small_and_has_no_script_and_loads_nothing(picture: str) -> None:
    assert len(picture.encode()) <= SIZE_MAX
    tree = ElementTree.fromstring(picture)
    assert {one.tag.removeprefix(SVG) for one in tree.iter()}.isdisjoint({"script", "image", "use", "foreignObject"})
    assert not [name for one in tree.iter() for name in one.attrib if name.startswith("on") or "href" in name]
    assert "url(" not in picture
    assert "@import" not in picture


def test_all_of_the_text_is_in_the_terminal(picture: str) -> None:
    recording = read(picture)
    lines = ["".join(one.itertext()) for one in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    words = (recording.prompt + recording.undisturbed).split()
    assert " ".join(lines).split()[len(lines[0].split()) :][: len(words)] == words


def _recording(texts: list[str], undisturbed: str, num_tokens_before: int = 1) -> Recording:
    return Recording(
        date="2026-01-02",
        machine="1 core <&>",
        prompt="<Once>",
        seed=1,
        pids={"engine-1": 11, "engine-2": 12},
        killed="engine-1",
        killed_s=1.5,
        num_tokens_before=num_tokens_before,
        pieces=[Piece(1.0 + index, 1, text) for index, text in enumerate(texts)],
        undisturbed=undisturbed,
    )


def test_a_recording_survives_its_picture() -> None:
    recording = _recording([" a & b\n\n", "]]>", " x" * 100], "other")
    picture = draw(recording)
    assert read(picture) == recording
    lines = ["".join(one.itertext()) for one in ElementTree.fromstring(picture).iter(f"{SVG}text")]
    assert max(len(line) for line in lines) <= COLUMNS
    assert f'viewBox="0 0 960 {HEIGHT}"' in picture


@pytest.mark.parametrize(
    ("recording", "is_proof"),
    [
        (_recording(["a", "b"], "ab"), True),
        (_recording(["a", "b"], "ac"), False),
        (_recording(["a", "b"], "ab", num_tokens_before=0), False),
        (_recording(["a", "b"], "ab", num_tokens_before=2), False),
    ],
)
def test_only_equal_texts_and_a_move_are_a_proof(recording: Recording, is_proof: bool) -> None:
    assert recording.is_proof() == is_proof
