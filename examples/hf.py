"""A Hugging Face Trainer with a guard in its loop: one line.

    python examples/hf.py [--steps N] [--run FOLDER]

A tiny Llama with random weights, on generated rows: nothing is downloaded. At step 20 a gradient becomes NaN.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import sealegs
from sealegs.integrations import hf

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--steps", type=int, default=200)
words.add_argument("--run", default="experiments/hf")
chosen = words.parse_args()

torch.manual_seed(0)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=100, max_position_embeddings=32, **size))
rows = (torch.arange(512)[:, None] + torch.arange(16)) % 100  # every token is the one before it, and one more
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=f"{chosen.run}/trainer",
        max_steps=chosen.steps,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        warmup_steps=20,
        weight_decay=0.1,
        adam_beta2=0.95,
        save_steps=100,
        logging_steps=20,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        report_to="none",
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
)
attached = hf.attach(trainer, run=f"{chosen.run}/run", playbook=sealegs.Playbook.standard())
with sealegs.inject(["nan-gradient@20"], model, clock=lambda: attached.guard.number):  # what the guard is for
    trainer.train()
for event in sealegs.open_run(f"{chosen.run}/run").events:
    if event.kind == "skip":
        print(event.detail["text"])
print(f"{trainer.state.global_step} steps, recorded in {chosen.run}/run")
