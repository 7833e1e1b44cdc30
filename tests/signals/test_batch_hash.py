"""A few digits that tell batches apart."""

import torch

from sealegs.signals.batch_hash import ELEMENTS, digest_of


def test_equal_batches_have_equal_digits_and_others_do_not() -> None:
    batch = {"tokens": torch.arange(12).reshape(3, 4), "mask": torch.ones(3, dtype=torch.bool)}
    same = {"tokens": torch.arange(12).reshape(3, 4), "mask": torch.ones(3, dtype=torch.bool)}
    assert digest_of(batch) == digest_of(same) != ""
    others: list[object] = [
        {**same, "tokens": torch.arange(12).reshape(4, 3)},
        {**same, "tokens": torch.arange(12).reshape(3, 4).int()},
        {**same, "tokens": torch.arange(12).reshape(3, 4).flip(0)},
        {"tokens": same["tokens"]},
        [same["tokens"]],
    ]
    digests = [digest_of(other) for other in others]
    assert digest_of(batch) not in digests
    assert len(set(digests[:4])) == 4
    assert digests[3] == digests[4], "how tensors are packed does not count"


def test_large_tensors_are_read_in_part_from_end_to_end() -> None:
    large = torch.zeros(10 * ELEMENTS)
    before = digest_of(large)
    large[10 * (ELEMENTS - 1)] = 1.0
    assert digest_of(large) != before
    assert digest_of((torch.zeros(10 * ELEMENTS).half(), ["text", 3])) != before


def test_what_cannot_be_read_has_no_digits() -> None:
    unreadable: list[object] = ["text", 7, None, [], torch.empty(0), torch.eye(3).to_sparse()]
    for batch in (*unreadable, torch.empty(3, device="meta")):
        assert digest_of(batch) == ""
