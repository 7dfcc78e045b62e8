"""Where sequences go: load, prefix overlap, and what was sent since the last heartbeat."""

from services.gateway.placement import PlacementBoard, PrefixIndex, served_models
from shared.messages import EngineStatus, Heartbeat, StreamStatus


def engine(name: str, sequence: int = 1, model: str = "m", state="ready", **status) -> Heartbeat:
    facts = EngineStatus(model, "/m", 2048, 100, 16, 64, 64, 8, **status)
    return Heartbeat("engine", name, "boot", 1, state, sequence, 0.1, facts)


def detokenizer(name: str, streams: int = 0, model: str = "m") -> Heartbeat:
    return Heartbeat("detokenizer", name, "boot", 1, "ready", 1, 0.1, StreamStatus(streams, model=model))


HASHES = [bytes([i]) * 16 for i in range(8)]


def test_the_least_loaded_engine_is_chosen():
    busy, idle = engine("a", num_running=4), engine("b")
    assert PlacementBoard().choose_engine([busy, idle], "m", 10, []) is idle


def test_draining_engines_and_other_models_are_left_out():
    board = PlacementBoard()
    assert board.choose_engine([engine("a", state="draining"), engine("b", model="x")], "m", 10, []) is None


def test_what_was_sent_since_the_heartbeat_counts():
    board, first, second = PlacementBoard(), engine("a"), engine("b")
    chosen = []
    for _ in range(4):
        pick = board.choose_engine([first, second], "m", 10, [])
        assert pick is not None
        board.placed(pick, 10, [])
        chosen.append(pick.id)
    assert chosen == ["a", "b", "a", "b"]
    assert board.choose_engine([engine("a", 2), engine("b", 2)], "m", 10, []) is not None


def test_a_shared_prefix_draws_a_prompt_to_the_engine_that_has_it():
    board, first, second = PlacementBoard(), engine("a"), engine("b")
    board.placed(second, 128, HASHES)
    fresh = [engine("a", 2), engine("b", 2)]
    pick = board.choose_engine(fresh, "m", 130, HASHES)
    assert pick is not None
    assert pick.id == "b"
    assert first.id == "a"


def test_the_prefix_index_forgets_the_oldest():
    index = PrefixIndex(2)
    index.add(HASHES[:3])
    assert index.overlap(HASHES[:3]) == 0
    assert index.overlap(HASHES[1:3]) == 2


def test_streams_spread_over_detokenizers_at_once():
    board, members = PlacementBoard(), [detokenizer("a"), detokenizer("b")]
    for expected in ("a", "b", "a"):
        pick = board.choose_detokenizer(members, "m")
        assert pick is not None
        assert pick.id == expected
        board.stream_opened((pick.id, pick.boot))
    board.stream_closed(("a", "boot"))
    board.stream_closed(("a", "boot"))
    pick = board.choose_detokenizer(members, "m", {("a", "boot")})
    assert pick is not None
    assert pick.id == "b"


def test_a_stream_goes_to_a_detokenizer_of_its_model_however_many_streams_that_one_has():
    board, members = PlacementBoard(), [detokenizer("a", model="other"), detokenizer("b", 9)]
    assert board.choose_detokenizer(members, "m") is members[1]
    assert board.choose_detokenizer(members, "none") is None


def test_served_models_lists_ready_engines_only():
    assert set(served_models([engine("a"), engine("b", model="x", state="starting")])) == {"m"}
