"""Reinforcement learning with TRL's GRPOTrainer, and a guard in its loop: one line.

    python examples/trl_grpo.py [--steps N] [--run FOLDER]

A tiny Qwen2 with random weights learns to write the letter a: nothing is downloaded. It learns so fast that no group
has a spread of rewards any more, which no loss shows: the guard says so.
"""

import argparse
import contextlib
import io
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import sealegs
from sealegs.integrations import hf

try:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
except ImportError as error:
    sys.exit(f"examples/trl_grpo.py needs TRL, which is not here ({error.name}): pip install trl")

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--steps", type=int, default=120)
words.add_argument("--run", default="experiments/trl-grpo")
chosen = words.parse_args()

PAD, END = "<pad>", "<eos>"
LETTERS = [PAD, END, *"0123456789abcdefghijklmnopqrstuvwxyz+="]
spelling = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token=PAD))
spelling.pre_tokenizer = pre_tokenizers.Split("", "isolated")
spelling.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling, pad_token=PAD, eos_token=END)

torch.manual_seed(0)
heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
size = {"vocab_size": len(LETTERS), "hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 32, **heads}
model = Qwen2ForCausalLM(Qwen2Config(**size, pad_token_id=0, eos_token_id=1, bos_token_id=1))


def share_of_a(completions: list[str], **_: object) -> list[float]:
    """The reward: which share of eight letters is an a."""
    return [text.count("a") / 8 for text in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=share_of_a,
    args=GRPOConfig(
        output_dir=f"{chosen.run}/trainer",
        max_steps=chosen.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        learning_rate=1e-2,
        warmup_steps=10,
        logging_steps=1,
        logging_nan_inf_filter=False,
        weight_decay=0.1,
        adam_beta2=0.95,
        save_steps=200,
        disable_tqdm=True,
        report_to="none",
        use_cpu=True,
        bf16=False,
    ),
    train_dataset=Dataset.from_list([{"prompt": f"{i % 10}+{i // 10}="} for i in range(64)]),
    processing_class=tokenizer,
)
attached = hf.attach(trainer, run=f"{chosen.run}/run", playbook=sealegs.Playbook.standard())
with contextlib.redirect_stdout(io.StringIO()):  # the Trainer prints every log
    trainer.train()
run = sealegs.open_run(f"{chosen.run}/run")
rewards = run.column("reward")[run.logged("reward")]
print(f"reward {rewards[:10].mean():.2f} in the first ten steps, {rewards[-10:].mean():.2f} in the last")
for event in run.events:
    if event.kind == "remark":
        print(event.detail["text"])
print(f"{trainer.state.global_step} steps, recorded in {chosen.run}/run")
