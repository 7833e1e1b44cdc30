"""Settings of the loops of drills, changed by flags."""

from sealegs.drills.loops import changed
from sealegs.lab.policy_gradient import PolicySettings
from sealegs.lab.settings import SIZES


def test_a_flag_changes_a_part_or_the_whole() -> None:
    settings = changed(SIZES["nano"], ["optimizer.clip=0", "dtype='fp16'"])
    assert (settings.optimizer.clip, settings.dtype) == (0, "fp16")
    assert settings.model == SIZES["nano"].model


def test_a_policy_is_changed_in_the_same_way() -> None:
    settings = changed(PolicySettings(), ["lr=0.03", "kl_weight=0.0"])
    assert (settings.lr, settings.kl_weight) == (0.03, 0.0)
