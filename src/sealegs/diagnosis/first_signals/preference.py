"""The signals of preference tuning in, what stands in them out.

The loss of a pair falls while its two answers are told apart better; it also falls where both become unlikely, and the
preferred one with them, and where every pair is learned by heart.
"""

from collections.abc import Iterator

import numpy as np

from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.first_signals.track import Track, track_of
from sealegs.record.run import Run

CHANCE = 0.5
"""The accuracy of guessing."""
SURE = 4.0
"""Standard errors by which an accuracy must have been above what it is in the end."""
FALLEN = 0.1
"""By how much an accuracy must have come down to be worth a look."""
WIDE = 10.0
"""A margin, in nats times beta, in which a pair has no gradient left to speak of."""
BY_HEART = 0.01
"""A loss of a pair, at the end of a run that knows its pairs by heart: ln 2 is the loss of guessing."""
UNLIKELY = 2.0
"""Implicit reward, below zero, from which on the preferred answers have become far less likely."""
SHARED = 0.5
"""Share of the fall of the other answers that the preferred ones fall, too."""


def judged(run: Run) -> Iterator[Standing]:
    """What stands in the first signals of preference tuning."""
    yield from _accuracy(track_of(run, "preference_accuracy"))
    margin, loss = track_of(run, "reward_margin"), track_of(run, "loss")
    if margin is not None and loss is not None:
        yield from _by_heart(margin, loss)
    yield from _displaced(run)


def _by_heart(margin: Track, loss: Track) -> Iterator[Standing]:
    """Pairs that are told apart by so much that hardly any has a gradient left."""
    row = loss.since(loss.level <= BY_HEART)
    if row is None or margin.end < WIDE or loss.values.min() < 0:
        return
    step = int(loss.steps[row])
    text = f"loss {loss.end:.2g} since step {step}, at a margin of {margin.end:.3g}: the pairs are known by heart"
    yield Standing(signal="reward_margin", step=step, text=text, shows="pairs-by-heart")


def _accuracy(accuracy: Track | None) -> Iterator[Standing]:
    """An accuracy that is back at guessing after it was above."""
    if accuracy is None:
        return
    width = max(5, accuracy.rows // 10)
    sums = np.concatenate([[0.0], np.cumsum(accuracy.means)])
    means = (sums[width:] - sums[:-width]) / width
    error = float(np.std(np.diff(accuracy.means))) / np.sqrt(2 * width)
    best, end = int(np.argmax(means)), float(means[-width:].max())
    fall = float(means[best]) - end
    if fall < max(FALLEN, (SURE + 2) * error):  # the best of many means is high by chance, too
        return
    half = float(means[best]) - fall / 2
    row = int(np.flatnonzero(means >= half)[-1]) + width // 2
    is_guess = float(means[-1]) <= max(CHANCE, float(means[0])) + 3 * error
    guess = ": no better than guessing" if is_guess else ""
    step = int(accuracy.steps[min(row + 1, accuracy.rows - 1)])
    text = f"preference accuracy {means[best]:.3g} at step {accuracy.steps[best]}, {end:.3g} in the end{guess}"
    yield Standing(
        signal="preference_accuracy", step=step, text=text, shows="preference-lost", is_grave=is_guess and fall > FALLEN
    )


def _displaced(run: Run) -> Iterator[Standing]:
    """Preferred answers that become unlikely with the others, while the margin between them grows."""
    chosen, rejected = track_of(run, "chosen_reward"), track_of(run, "rejected_reward")
    if chosen is None or rejected is None:
        return
    fall, other = chosen.early(0.0, 0.1) - chosen.end, rejected.early(0.0, 0.1) - rejected.end
    if fall < UNLIKELY or chosen.end > -UNLIKELY or fall < SHARED * other:
        return
    row = chosen.since(chosen.level <= -UNLIKELY)
    if row is None:
        return
    text = (
        f"implicit reward of the preferred answers {chosen.end:.3g} in the end, below {-UNLIKELY:g} since step "
        f"{chosen.steps[row]}, of the others {rejected.end:.3g}: both become unlikely"
    )
    yield Standing(signal="chosen_reward", step=int(chosen.steps[row]), text=text, shows="preferred-becomes-unlikely")
