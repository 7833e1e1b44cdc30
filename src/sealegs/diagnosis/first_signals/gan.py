"""The losses of a GAN in, what stands in them out.

Each falls where the other rises, so neither says how good the pictures are. One thing shows: a discriminator that is
never wrong gives the generator no gradient that means anything.
"""

from collections.abc import Iterator

from sealegs.diagnosis.contract import Standing
from sealegs.diagnosis.first_signals.track import track_of
from sealegs.record.run import Run

WON = 0.02
"""Share of its early level that is left of the discriminator's loss where it has won."""
WON_FOR_GOOD = 0.002
RISEN = 2.0
"""Growth of the generator's loss that goes with it."""


def judged(run: Run) -> Iterator[Standing]:
    """What stands in the two losses. A critic's may be negative, and says nothing of the kind."""
    critic, generator = track_of(run, "discriminator_loss"), track_of(run, "generator_loss")
    if critic is None or generator is None or critic.values.min() < 0:
        return
    row = critic.falls(WON)
    usual = generator.early()
    if row is None or not generator.end >= usual + (RISEN - 1) * abs(usual):
        return
    high = float(critic.level[: critic.rows - critic.lasting].max())
    text = (
        f"discriminator loss {critic.end:.2g} since step {critic.steps[row]}, {high:.3g} at its highest, and generator "
        f"loss {generator.end:.3g}, {usual:.3g} at first: the discriminator is never wrong"
    )
    is_grave = critic.end <= WON_FOR_GOOD * high and critic.rows - row >= critic.rows // 4
    yield Standing(
        signal="discriminator_loss",
        step=int(critic.steps[row]),
        text=text,
        shows="discriminator-wins",
        is_grave=is_grave,
    )
