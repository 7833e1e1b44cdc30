"""LoRA with PEFT and the Hugging Face Trainer, and nothing of Sealegs in it: `sealegs run` brings the guard.

    sealegs run --act --run lora -- python examples/lora.py [--steps N]

A tiny Llama with random weights: nothing is downloaded. At step 20 a gradient becomes NaN.
"""

import argparse
import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

try:
    from peft import LoraConfig, get_peft_model
except ImportError as error:
    sys.exit(f"examples/lora.py needs PEFT, which is not here ({error.name}): pip install peft")

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--steps", type=int, default=200)
chosen = words.parse_args()

torch.manual_seed(0)
size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=100, max_position_embeddings=32, **size))
adapter = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
model = get_peft_model(base, adapter)
rows = (torch.arange(512)[:, None] + torch.arange(16)) % 100  # every token is the one before it, and one more


class Strike(TrainerCallback):
    """What the guard is for: a gradient that is not a number, at one step."""

    def on_step_begin(self, args, state, control, model, **_):
        """Strike the first gradient of step 20, on its way back."""
        weight = next(each for each in model.parameters() if each.requires_grad)
        if state.global_step == 20:
            self.hook = weight.register_hook(lambda gradient: gradient * float("nan"))

    def on_step_end(self, args, state, control, **_):
        """Once."""
        if state.global_step == 21:
            self.hook.remove()


with tempfile.TemporaryDirectory() as folder:
    settings = TrainingArguments(
        output_dir=folder,
        max_steps=chosen.steps,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        warmup_steps=5,
        logging_steps=20,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(
        model=model,
        args=settings,
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],
        callbacks=[Strike()],
    )
    trainer.train()
sound = all(bool(weight.isfinite().all()) for weight in model.parameters())
print(f"{trainer.state.global_step} steps, weights {'finite' if sound else 'lost'}")
