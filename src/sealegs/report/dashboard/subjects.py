"""What each panel of the dashboard shows: the ten that every page has, and those of some kinds of run."""

from dataclasses import dataclass

from sealegs.record.schema import SIGNALS


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelSubject:
    """What a panel shows."""

    number: int
    title: str
    unit: str
    signals: tuple[str, ...]
    groups: tuple[str, ...] = ()
    """Signals that come by layer or by parameter group: ``param_norm/blocks.3``."""
    otherwise: tuple[str, ...] = ()
    """Signals to draw where none of these was logged, and their unit."""
    has_log_scale: bool = True
    of_what: str = "the batch"
    """What the shares on the right axis are shares of."""

    @property
    def wanted(self) -> tuple[str, ...]:
        """The signals that would fill the panel."""
        return (*self.signals, *(f"{name}/<...>" for name in self.groups))


SUBJECTS = (
    PanelSubject(number=1, title="Loss", unit="nats a token", signals=("loss", "eval_loss")),
    PanelSubject(number=2, title="Learning rate", unit="", signals=("lr",)),
    PanelSubject(number=3, title="Gradient norm before clipping", unit="", signals=("grad_norm",)),
    PanelSubject(
        number=4, title="Activations per layer", unit="", signals=(), groups=("activation_norm", "attention_logit_max")
    ),
    PanelSubject(number=5, title="Parameter norm", unit="", signals=("param_norm",), groups=("param_norm",)),
    PanelSubject(number=6, title="Optimizer moments", unit="", signals=("moment1_norm", "moment2_norm")),
    PanelSubject(
        number=7,
        title="Loss of single tokens",
        unit="nats",
        signals=("token_loss_histogram",),
        has_log_scale=False,
    ),
    PanelSubject(
        number=8,
        title="Throughput",
        unit="tokens a second",
        signals=("tokens_per_s",),
        otherwise=("step_s", "seconds a step"),
    ),
    PanelSubject(number=9, title="Loss scale", unit="", signals=("loss_scale",)),
    PanelSubject(
        number=10,
        title="Batch composition",
        unit="entropy, nats",
        signals=("token_entropy", "sources", "batch_hash", "rare_token_share"),
        has_log_scale=False,
    ),
)
"""The panels of every page. Post-mortems cite them by their numbers, which therefore stay."""

OF_A_KIND = (
    PanelSubject(
        number=11,
        title="Reward",
        unit="reward",
        signals=("reward", "reward_std", "eval_reward", "zero_spread_share"),
        has_log_scale=False,
        of_what="the groups",
    ),
    PanelSubject(number=12, title="Entropy of the policy", unit="nats", signals=("policy_entropy",)),
    PanelSubject(number=13, title="Divergence of the policy", unit="nats", signals=("kl", "policy_kl")),
    PanelSubject(
        number=14,
        title="Importance ratio and clipping",
        unit="ratio",
        signals=("importance_ratio", "importance_ratio_max", "clip_share"),
        of_what="the tokens",
    ),
    PanelSubject(
        number=15, title="Sampler against trainer", unit="log-probability", signals=("logp_gap", "logp_gap_max")
    ),
    PanelSubject(
        number=16,
        title="Length of completions",
        unit="tokens",
        signals=("completion_length", "cut_share"),
        of_what="the completions",
    ),
    PanelSubject(
        number=17,
        title="Preference",
        unit="implicit reward",
        signals=("reward_margin", "chosen_reward", "rejected_reward", "preference_accuracy"),
        has_log_scale=False,
        of_what="the pairs",
    ),
    PanelSubject(
        number=18,
        title="Log-probability of answers",
        unit="nats",
        signals=("chosen_logp", "rejected_logp"),
        has_log_scale=False,
    ),
    PanelSubject(number=19, title="Load of each expert", unit="load", signals=(), groups=("expert_load",)),
    PanelSubject(
        number=20,
        title="Balance of the experts",
        unit="load above the mean",
        signals=("expert_violation", "dead_expert_share"),
        groups=("expert_violation",),
        of_what="the experts",
    ),
    PanelSubject(
        number=21, title="Entropy of the router", unit="nats", signals=("router_entropy",), groups=("router_entropy",)
    ),
    PanelSubject(
        number=22,
        title="Losses of the router",
        unit="",
        signals=("router_balance_loss", "router_z_loss"),
        groups=("router_balance_loss", "router_z_loss"),
    ),
    PanelSubject(
        number=23,
        title="Values lost in few bits",
        unit="share of the values",
        signals=("saturated_share", "zeroed_share"),
        groups=("saturated_share", "zeroed_share"),
    ),
    PanelSubject(
        number=24,
        title="Range of values in few bits",
        unit="",
        signals=("amax",),
        groups=("amax", "quant_scale"),
    ),
    PanelSubject(number=25, title="Loss by position", unit="nats", signals=(), groups=("loss_at_position",)),
    PanelSubject(number=26, title="Loss by timestep", unit="", signals=(), groups=("loss_at_timestep",)),
    PanelSubject(number=27, title="Loss by source", unit="nats", signals=(), groups=("loss_of_source",)),
    PanelSubject(
        number=28,
        title="Discriminator and generator",
        unit="loss",
        signals=("discriminator_loss", "generator_loss"),
        has_log_scale=False,
    ),
)
"""The panels of some kinds of run, which a page has only if one of their signals was logged."""
BESIDE = frozenset(
    ("rare_token_share", "zero_spread_share", "clip_share", "cut_share", "preference_accuracy", "dead_expert_share")
)
"""Signals that are drawn on a right axis, which goes from 0 to 1."""
DASHED = frozenset(("attention_logit_max", "quant_scale", "router_z_loss", "zeroed_share"))
"""Second families of a panel: their lines by layer or tensor are dashed."""
MEANINGS = SIGNALS | {
    "rare_token_share": f"{SIGNALS['rare_token_share']}; `sealegs train` counts them, elsewhere log it yourself"
}
LABELS = {
    "loss": "loss",
    "eval_loss": "evaluation loss",
    "moment1_norm": "first moment",
    "moment2_norm": "second moment",
    "param_norm": "all",
    "attention_logit_max": "largest logit",
    "amax": "amax",
    "quant_scale": "scale",
    "eval_reward": "held-out reward",
    "reward_std": "spread",
    "zero_spread_share": "groups without spread",
    "kl": "to the reference",
    "policy_kl": "to the sampler",
    "importance_ratio": "mean ratio",
    "importance_ratio_max": "largest ratio",
    "logp_gap": "mean difference",
    "logp_gap_max": "largest difference",
    "cut_share": "cut at the limit",
    "reward_margin": "margin",
    "chosen_reward": "preferred",
    "rejected_reward": "other",
    "preference_accuracy": "accuracy",
    "chosen_logp": "preferred",
    "rejected_logp": "other",
    "expert_violation": "largest, less 1",
    "dead_expert_share": "dead experts",
    "router_balance_loss": "balance loss",
    "router_z_loss": "z-loss",
    "saturated_share": "saturated",
    "zeroed_share": "zeroed",
    "discriminator_loss": "discriminator",
    "generator_loss": "generator",
}
