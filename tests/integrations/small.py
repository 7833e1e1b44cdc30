"""What the tests of the integrations train: a model of two thousand numbers on sixty-four rows.

Nothing here imports a framework when it is imported: every worker of a test run collects all tests, and one runs these.
"""

import hashlib
import string
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sealegs.faults.injector import inject
from sealegs.faults.spec import parse

STEPS = 30
NAN, SPIKE = 12, 20
FAULTS = (f"nan-gradient@{NAN}", f"gradient-scale:factor=1000@{SPIKE}")
"""A gradient that is not a number, and one that is far too large."""


def rows(count: int = 64) -> Tensor:
    """Token ids of which something can be learned: each row repeats its first one."""
    ids = torch.randint(0, 40, (count, 10), generator=torch.Generator().manual_seed(1))
    ids[:, 1::2] = ids[:, :1]
    return ids


def llama(*, tie_word_embeddings: bool = True) -> Any:
    """A Llama, the same every time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tie_word_embeddings,
    )
    return LlamaForCausalLM(config)


def speller() -> Any:
    """A tokenizer of small letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, end = "<pad>", "<eos>"
    numbers = {letter: number for number, letter in enumerate([pad, end, *string.ascii_lowercase])}
    spelling = Tokenizer(models.WordLevel(numbers, unk_token=pad))
    spelling.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    spelling.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=spelling, pad_token=pad, eos_token=end)


def trainer(folder: Path, *, data: Any = None, model: Any = None, **settings: Any) -> Any:
    """A Trainer as somebody would have it; 16 batches are an epoch."""
    from transformers import Trainer, TrainingArguments

    arguments: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "warmup_steps": 5,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "adam_beta2": 0.9,
        "logging_steps": 5,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    data = [{"input_ids": row, "labels": row} for row in rows()] if data is None else data
    return Trainer(model=model or llama(), args=TrainingArguments(**arguments | settings), train_dataset=data)


def attached(trainer: Any, run: Path | None, **options: Any) -> Any:
    """A Trainer with a guard; what the pre-flight check says of these settings is another test's."""
    from sealegs.integrations import hf
    from sealegs.integrations.preflight_advice import PreflightWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PreflightWarning)
        return hf.attach(trainer, run=run, **options)


def digest(model: nn.Module, optimizer: Optimizer | None = None) -> str:
    """Of every bit of the weights, and of what the optimizer remembers."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for tensor in (parameter, *(state[name] for name in sorted(state))):
            found.update(tensor.detach().double().cpu().numpy().tobytes())
    return found.hexdigest()


@contextmanager
def broken(model: nn.Module, clock: Callable[[], int], faults: tuple[str, ...] = FAULTS) -> Iterator[None]:
    """A model whose gradients go wrong at steps of a clock."""
    with inject([parse(fault) for fault in faults], model, clock=clock):
        yield


def logged(trainer: Any) -> list[dict[str, Any]]:
    """What a Trainer has logged, but for times."""
    return [
        {name: value for name, value in entry.items() if "runtime" not in name and "per_second" not in name}
        for entry in trainer.state.log_history
    ]
