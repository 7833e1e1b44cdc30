"""LoRA with Unsloth and TRL, and nothing of Sealegs in it: `sealegs run` brings the guard.

    sealegs run --act --run lora -- python examples/unsloth_lora.py [--model NAME] [--steps N]

Needs a GPU that Unsloth knows, and downloads the model.
"""

import argparse
import sys

try:
    from unsloth import FastLanguageModel  # first: it replaces parts of those below
except ImportError as error:
    sys.exit(f"examples/unsloth_lora.py needs Unsloth, which is not here ({error.name}): pip install unsloth")
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
words.add_argument("--model", default="unsloth/Llama-3.2-1B-Instruct")
words.add_argument("--steps", type=int, default=60)
words.add_argument("--out", default="outputs")
chosen = words.parse_args()

model, tokenizer = FastLanguageModel.from_pretrained(model_name=chosen.model, max_seq_length=512, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(
    model,
    r=16,
    lora_alpha=16,
    lora_dropout=0.0,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    random_state=3407,
)
numbers = range(20)
rows = [f"{one} and {other} make {one + other}.{tokenizer.eos_token}" for one in numbers for other in numbers]
trainer = SFTTrainer(
    model=model,
    processing_class=tokenizer,
    train_dataset=Dataset.from_dict({"text": rows}),
    args=SFTConfig(
        output_dir=chosen.out,
        dataset_text_field="text",
        max_steps=chosen.steps,
        per_device_train_batch_size=8,
        learning_rate=2e-4,
        warmup_steps=5,
        lr_scheduler_type="linear",
        logging_steps=1,
        logging_nan_inf_filter=False,
        report_to="none",
        seed=3407,
    ),
)
trainer.train()
print(f"{trainer.state.global_step} steps")
