"""Steps of the lab that are run again."""

from dataclasses import replace
from pathlib import Path

import torch

from sealegs.lab.settings import SIZES, DataSettings
from sealegs.lab.sources import open_data
from sealegs.lab.subject import subject_of
from sealegs.lab.train import resolved


def test_the_batches_of_two_ranks_have_the_gradients_of_the_whole(tokens_file: Path) -> None:
    data = DataSettings(sources={str(tokens_file): 1.0}, batch=4)
    settings = resolved(replace(SIZES["nano"], data=data, device="cpu", dtype="fp32", threads=1))
    batch = open_data(settings).training.batch(0)
    parts = [replace(batch, tokens=batch.tokens[r::2], targets=batch.targets[r::2], spans=()) for r in range(2)]
    assert parts[0].target_count == parts[1].target_count
    subject = subject_of(settings)
    shown = []
    for batches in ([batch], parts):
        subject.model.zero_grad()
        loss = subject.gradients([each.recorded() for each in batches])
        shown.append((loss, [weight.grad for weight in subject.model.parameters()]))
    torch.testing.assert_close(shown[0], shown[1])
