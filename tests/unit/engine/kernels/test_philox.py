import numpy as np
import pytest

from antiphon.services.engine.kernels.philox import philox_4x32, uniforms

ONES = 0xFFFFFFFF


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(
    ("key", "counter", "block"),
    [
        ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES), (ONES,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0xA4093822, 0x299F31D0),
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_blocks(
    key: tuple[int, ...], counter: tuple[int, ...], block: tuple[int, ...]
) -> None:
    given = philox_4x32(words(*key), words(*counter))  # pyright: ignore[reportArgumentType]
    assert tuple(int(word[0]) for word in given) == block


@pytest.mark.matrix("P-06")
def test_a_number_depends_on_its_own_seed_and_position_only() -> None:
    seeds = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    positions = np.array([0, 5, 5, 2**31], dtype=np.int64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_another_purpose_gives_another_number() -> None:
    seed, position = np.array([9], dtype=np.uint64), np.array([3])
    assert uniforms(seed, position, purpose=0) != uniforms(seed, position, purpose=1)


@pytest.mark.matrix("P-06")
@pytest.mark.parametrize("along", ["seeds", "positions"])
def test_numbers_are_uniform_along_seeds_and_along_positions(along: str) -> None:
    count, bins = 100_000, 100
    steps = np.arange(count)
    seeds = (steps if along == "seeds" else np.full(count, 1234)).astype(np.uint64)
    draws = uniforms(seeds, np.zeros(count, np.int64) if along == "seeds" else steps)
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    observed = np.histogram(draws, bins, (0.0, 1.0))[0]
    chi_square = ((observed - count / bins) ** 2 / (count / bins)).sum()
    # 99 degrees of freedom: beyond 148.2 once in a thousand, and the draws are fixed.
    assert chi_square < 148.2
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.01
