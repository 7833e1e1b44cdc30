"""Rules about a model that was trained before: its rate, its quantised base, and what of an answer counts."""

from sealegs.preflight_check.rule import Family, RuleFinding
from sealegs.report.commands.preflight import Grade

FINETUNING = Family("TUN", "fine-tuning")

LOW_FOR_ADAPTER, HIGH_FOR_ADAPTER, HIGHEST_FOR_ADAPTER = 1e-5, 1e-3, 5e-3
"""Rates of adapters: below the first hardly anything moves in a few hundred steps; 2e-4 is usual."""
HIGH_FOR_ALL = 1e-4
"""A rate at which all weights of a large model forget what they knew; 1e-5 to 2e-5 is usual."""
LARGE, SMALL_FACTOR = 1_000_000_000, 10
"""Parameters from which on a model is large. Models that are smaller stand ten times that rate."""


@FINETUNING.rule()
def rate_of_another_training(
    lr: float,
    finetunes: bool,
    adapter: bool,
    objective: str = "answers",
    parameters: int | None = None,
) -> RuleFinding | None:
    """The learning rate belongs to another kind of training.

    Why: an adapter begins at nothing and is a small part of the weights: at the rate that is right for all of them,
      1e-5, it has hardly moved after some hundred steps. At an adapter's rate, 2e-4, all weights of a large model are
      overwritten in as many: the loss leaps in the first hundred steps, or other skills go.
    Set: lr to 1e-4 to 2e-4 for an adapter, to 1e-5 to 2e-5 for all weights of a large model; less for pairs, rewards.
    Sure: supported at several sizes; the best rate of an adapter is about ten times that of all weights.
    See: Biderman et al. 2024, LoRA learns less and forgets less; Schulman et al. 2025, LoRA without regret.
    """
    if not (adapter or finetunes):
        return None
    if not adapter:
        most = HIGH_FOR_ALL * (SMALL_FACTOR if parameters is not None and parameters < LARGE else 1)
        if lr < most:
            return None
        grade: Grade = "note" if parameters is None else "warning"
        return RuleFinding(grade, f"{lr:g} for all weights of a model that was trained before", "lr", "1e-5 to 2e-5")
    if lr > HIGH_FOR_ADAPTER:
        grade = "warning" if lr < HIGHEST_FOR_ADAPTER else "error"
        return RuleFinding(grade, f"{lr:g} for an adapter", "lr", "1e-4 to 2e-4")
    if lr < LOW_FOR_ADAPTER and objective == "answers":
        return RuleFinding("note", f"{lr:g} for an adapter", "lr", "1e-4 to 2e-4")
    return None


@FINETUNING.rule()
def quantised_base_is_trained(quantised: str, adapter: bool) -> RuleFinding | None:
    """All weights of a quantised base are to be trained.

    Why: a weight of four or eight bits has no gradient, and no room for an update. Either the framework refuses, or
      what is trained is the little that was not quantised: norms, and perhaps the embedding.
    Set: an adapter beside the quantised base; or the base in bf16.
    Sure: established.
    See: Dettmers et al. 2023, QLoRA.
    """
    if adapter:
        return None
    return RuleFinding("error", f"{quantised} weights, and no adapter beside them", "adapter", "true; or no quantising")


@FINETUNING.rule()
def quantised_base_computes_otherwise(quantised: str, compute_dtype: str, dtype: str) -> RuleFinding | None:
    """A quantised base computes in another format than the rest.

    Why: weights are unpacked into the compute format at each use, and that is fp32 unless one is set: right and slow.
      fp16 under bf16 is worse: activations of a model that was trained in bf16 pass 65504 there, and the loss is NaN.
    Set: bnb_4bit_compute_dtype to the format of the run, bf16 where the hardware has it.
    Sure: established.
    See: Dettmers et al. 2023, QLoRA; the documentation of transformers, on BitsAndBytesConfig.
    """
    if compute_dtype == dtype:
        return None
    grade: Grade = "warning" if "fp16" in (compute_dtype, dtype) else "note"
    found = f"a base of {quantised} computes in {compute_dtype}, the run in {dtype}"
    return RuleFinding(grade, found, "bnb_4bit_compute_dtype", dtype)


@FINETUNING.rule()
def padded_on_the_left(padding_side: str, finetunes: bool, objective: str = "answers") -> RuleFinding | None:
    """Rows are padded on the left while answers are learned.

    Why: the left is for writing answers, where all rows must end at once. In training it moves every text to other
      positions from batch to batch unless positions are counted from the mask, and rows of nothing but mask in front
      are what attention kernels make NaN of.
    Set: padding_side to right for training; left for generation.
    Sure: supported; models that count positions from the mask do not mind.
    See: the documentation of transformers, on padding; LlamaFactory issue 8088.
    """
    if not finetunes or padding_side != "left" or objective == "reward":
        return None
    return RuleFinding("note", "rows are padded on the left", "padding_side", "right")


@FINETUNING.rule()
def answers_are_not_learned(answers_learned: float) -> RuleFinding | None:
    """What counts for the loss is not the answer.

    Why: in a chat template that does not match, or with a mask that is turned round, prompts count and answers do not.
      The loss falls as it should; the model learns to ask.
    Set: labels of the answer, and -100 before it; print one row as the collator makes it.
    Sure: established for the batch that was shown.
    See: the documentation of trl, on completion_only_loss and assistant_only_loss.
    """
    if answers_learned >= 0.5:
        return None
    found = f"the last quarter of a row counts in {answers_learned:.0%} of the rows that have targets"
    return RuleFinding("error" if answers_learned == 0 else "warning", found, "labels", "the end of each row, too")


@FINETUNING.rule()
def end_is_not_learned(ends_learned: bool, answers_learned: float = 1.0) -> RuleFinding | None:
    """The end of an answer is never a target.

    Why: where padding is the same token as the end, the collator masks both, and the model never learns to stop:
      answers run on to the limit. The loss does not show it.
    Set: a padding token of its own; or a mask by position, not by token.
    Sure: established for the batch that was shown.
    See: the documentation of transformers, on DataCollatorForLanguageModeling.
    """
    if ends_learned or answers_learned == 0:  # then nothing of the answer is
        return None
    found = "rows have the token that ends an answer, and no label is that token"
    return RuleFinding("warning", found, "pad_token", "another one than eos_token")


@FINETUNING.rule()
def begins_twice(doubled_bos: bool) -> RuleFinding | None:
    """Rows begin with two tokens of the beginning.

    Why: a chat template writes it, and the tokenizer adds one more. The model has never seen two: what follows is as of
      another text, at some tenths of the loss, and answers are worse when it is asked with one.
    Set: add_special_tokens=False where the template has been applied.
    Sure: established for the batch that was shown; how much it costs depends on the model.
    See: the documentation of transformers, on chat templates.
    """
    return (
        RuleFinding("warning", "each row begins with it twice", "add_special_tokens", "false") if doubled_bos else None
    )
