"""Packed masks of allowed tokens."""

import numpy as np
import pytest

from antiphon.services.engine.sampling import masks


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 70])
@pytest.mark.parametrize("num_bytes", [0, 4, 8, 12])
def test_bytes_give_a_mask_of_the_vocabulary(vocab_size: int, num_bytes: int) -> None:
    bits = np.unpackbits(np.full(num_bytes, 0b10110101, dtype=np.uint8), bitorder="little")
    allowed = [token for token, bit in enumerate(bits[:vocab_size].tolist()) if bit]
    mask = masks.of_bytes(bytes([0b10110101] * num_bytes), vocab_size)
    assert (mask.dtype, mask.shape) == (np.uint32, (masks.num_words(vocab_size),))
    assert masks.allowed_ids(mask, vocab_size).tolist() == allowed
    assert np.unpackbits(mask.view(np.uint8)).sum() == len(allowed), "bits beyond the vocabulary are 0"


@pytest.mark.parametrize("vocab_size", [32, 50])
def test_several_masks_at_once_forbid_what_each_forbids(vocab_size: int) -> None:
    each = [masks.only(ids, vocab_size) for ids in ([0], [3, 31], [], list(range(vocab_size)))]
    found = masks.forbidden(np.stack(each), vocab_size)
    assert found.tolist() == [masks.forbidden(mask, vocab_size).tolist() for mask in each]
    assert found.sum(axis=1).tolist() == [vocab_size - 1, vocab_size - 2, vocab_size, 0]


@pytest.mark.parametrize("vocab_size", [32, 50])
def test_the_greatest_logit_of_a_forbidden_token_is_minus_infinity(vocab_size: int) -> None:
    each = np.stack([masks.only(ids, vocab_size) for ids in ([0], [3, 31], [], list(range(vocab_size)))])
    forbidden = masks.forbidden(each, vocab_size)
    assert masks.greatest_logits(each, vocab_size).tolist() == np.where(forbidden, -np.inf, np.inf).tolist()
    assert masks.greatest_logits(each[1], vocab_size).tolist() == np.where(forbidden[1], -np.inf, np.inf).tolist()
