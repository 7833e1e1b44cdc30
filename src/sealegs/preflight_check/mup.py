"""Initial weights and learning rates under muP at another width than the base width.

Tensor Programs V (Yang et al. 2022), table 8, for Adam: hidden matrices start with a variance of 1/fan_in and learn at
a rate of 1/fan_in. Embeddings and the head start and learn the same at every width. Logits are divided by the width,
attention logits by the width of a head instead of its root. All of this is relative to the base width, at which a run
is an ordinary one except for its attention.
"""

import math
from collections.abc import Mapping
from typing import Any

from sealegs.report.commands.preflight import Mup, MupRow


def mup_of(known: Mapping[str, Any]) -> Mup | None:
    """The muP table of a plan that names a base width."""
    base, width, lr = known.get("mup_base_width"), known.get("width"), known.get("lr")
    if not base or not width:
        return None
    times = width / base
    standard = math.sqrt(1 / (3 * width))
    hidden = known.get("init_std", standard)
    outside = hidden * math.sqrt(times)
    rows = [
        MupRow(
            tensors="embedding",
            init_std=outside,
            standard_init_std=standard,
            lr=lr,
            standard_lr=lr,
            multiplier=1.0,
            wrong=f"vectors of tokens would begin {outside / standard:.3g} times smaller, with updates as large",
        ),
        MupRow(
            tensors="hidden matrices",
            init_std=hidden,
            standard_init_std=standard,
            lr=None if lr is None else lr / times,
            standard_lr=lr,
            multiplier=1.0,
            wrong=f"one update would move what they give {times:.3g} times as far as at the base width, since its "
            "entries all pull the same way; and query times key over the root of the head's width grows with "
            "that width once they have learnt to agree: divide by the width",
        ),
        MupRow(
            tensors="head",
            init_std=outside,
            standard_init_std=standard,
            lr=lr,
            standard_lr=lr,
            multiplier=1 / times,
            wrong=f"one update would move the logits {times:.3g} times as far",
        ),
    ]
    return Mup(width=width, base_width=base, rows=rows)
