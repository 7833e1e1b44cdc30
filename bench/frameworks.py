"""What a guard costs within the step of a framework, side by side in one run with that framework alone.

    OMP_NUM_THREADS=1 python bench/frameworks.py [--only hf lightning] [--blocks 14] [--width 128] [--out FILE.json]
    python bench/frameworks.py --device cuda --width 512 --layers 12 --rows 32 --length 1024

For each framework three loops train at once, in three threads of which one has the word at a time: one with a guard,
and the framework alone, twice. After a block of steps the word goes round, so that whatever else the machine does
strikes all of them. A block has ten steps, one of which is looked at closely. The guarded one is compared with the mean
of the two others of the same round, and these with each other as a control; the median of these ratios is printed, with
the interval that it lies in with 95 % confidence (from its rank among the rounds). Where a model lies in memory is
worth some percent on a CPU, for as long as it lies there: so everything is made anew three times, and each time another
loop is the guarded one. Times are those of the thread on its core, and by the clock: the first are what a shared
machine can tell, the second hold waits, and those for a GPU, which is waited for after each block.

Another framework is one more function in FRAMEWORKS: it trains, and calls ``tick`` at the end of each step.
"""

import argparse
import json
import math
import platform
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

Tick = Callable[[], None]
WARM = 2
"""Rounds that do not count."""


class Size(NamedTuple):
    """Of what is trained, and where."""

    width: int
    layers: int
    rows: int
    length: int
    device: str
    fused: bool
    """Whether the optimizer is, so that a device can decide about its updates."""


Framework = Callable[[Size, int, Path | None, Tick], None]


class Spent(NamedTuple):
    """Seconds of a step, on the core and by the clock."""

    core: float
    clock: float


def now() -> Spent:
    """When all that was asked of a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Spent(time.thread_time(), time.perf_counter())


class Round:
    """Gives the word to one loop after the other, for a block of steps each, and keeps what each block took."""

    def __init__(self, loops: int, block: int) -> None:
        self.blocks: list[list[Spent]] = [[] for _ in range(loops)]
        self._block = block
        self._turn = 0
        self._here = set(range(loops))
        self._changed = threading.Condition()

    def take_word(self, loop: int) -> None:
        """Wait for it."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == loop)

    def ticker(self, loop: int) -> Tick:
        """What a loop calls at the end of each step."""
        done, began = 0, now()

        def tick() -> None:
            nonlocal done, began
            done += 1
            if done % self._block == 0:
                ended = now()
                self.blocks[loop].append(Spent(*((b - a) / self._block for a, b in zip(began, ended, strict=True))))
                self.hand_on(loop)
                self.take_word(loop)
                began = now()

        return tick

    def hand_on(self, loop: int, *, ends: bool = False) -> None:
        """To the next that still trains."""
        with self._changed:
            if ends:
                self._here.discard(loop)
            after = sorted(self._here, key=lambda other: (other <= loop, other))
            self._turn = after[0] if after else -1
            self._changed.notify_all()


def side_by_side(train: Framework, size: Size, steps: int, block: int, guarded: int) -> list[list[Spent]]:
    """Blocks of three loops, of which one is guarded; those of it come second."""
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / "run" if number == guarded else None for number in range(3)]
        blocks = _blocks(train, size, steps, block, runs)
    alone, again = (blocks[number][WARM:] for number in range(3) if number != guarded)
    return [alone, blocks[guarded][WARM:], again]


def _blocks(train: Framework, size: Size, steps: int, block: int, runs: list[Path | None]) -> list[list[Spent]]:
    rounds = Round(len(runs), block)
    failed: list[BaseException] = []

    def loop(number: int, run: Path | None) -> None:
        rounds.take_word(number)
        try:
            train(size, steps, run, rounds.ticker(number))
        except BaseException as error:
            failed.append(error)
        finally:
            rounds.hand_on(number, ends=True)

    threads = [threading.Thread(target=loop, args=each) for each in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return rounds.blocks


def llama(size: Size) -> Any:
    """Random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": size.width, "intermediate_size": 3 * size.width, "num_hidden_layers": size.layers}
    heads = max(4, size.width // 64)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=1000, max_position_embeddings=size.length, num_attention_heads=heads, **shape)
    )


def tokens(size: Size) -> torch.Tensor:
    """Eight batches of them."""
    return torch.randint(0, 1000, (8 * size.rows, size.length), generator=torch.Generator().manual_seed(0))


def hf(size: Size, steps: int, run: Path | None, tick: Tick) -> None:
    """The Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from sealegs.integrations.hf import attach
    from sealegs.integrations.preflight_advice import PreflightWarning

    class Ticking(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            tick()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=size.rows,
            learning_rate=1e-6,
            bf16=size.device == "cuda",
            optim="adamw_torch_fused" if size.fused else "adamw_torch",
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=size.device == "cpu",
            dataloader_pin_memory=False,
        )
        data = [{"input_ids": row, "labels": row} for row in tokens(size)]
        trainer = Trainer(model=llama(size), args=arguments, train_dataset=data, callbacks=[Ticking()])
        trainer.log = lambda *_, **__: None  # which prints
        if run is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PreflightWarning)
                attach(trainer, run=run)
        trainer.train()


def accelerate(size: Size, steps: int, run: Path | None, tick: Tick) -> None:
    """A loop of Accelerate's."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from sealegs.integrations.accelerate import attach as guarded

    accelerator = Accelerator(cpu=size.device == "cpu", mixed_precision="bf16" if size.device == "cuda" else "no")
    model = llama(size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=size.fused or None)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    loader: Any = DataLoader(tokens(size), batch_size=size.rows)  # type: ignore[arg-type]
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    guard = None if run is None else guarded(accelerator, model, optimizer, scheduler=scheduler, run=run)
    for _ in range(math.ceil(steps / len(loader))):
        for ids in loader if guard is None else guard.batches(loader):
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=ids).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                if guard is None:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                else:
                    guard.step(loss)
            tick()
    if guard is not None:
        guard.close()


def lightning(size: Size, steps: int, run: Path | None, tick: Tick) -> None:
    """``Trainer.fit`` of Lightning."""
    import lightning.pytorch as L
    from torch.utils.data import DataLoader

    from sealegs.integrations.lightning import Guarded

    class Pretraining(L.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(size)

        def training_step(self, ids: torch.Tensor, batch_idx: int) -> Any:
            return self.model(input_ids=ids, labels=ids).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-6, fused=size.fused or None)

    class Ticking(L.Callback):  # type: ignore[misc]
        def on_train_batch_start(self, *_: Any) -> None:
            tick()  # between the steps, when all that the last one caused is done

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            max_steps=steps,
            accelerator=size.device,
            precision="bf16-mixed" if size.device == "cuda" else "32-true",
            gradient_clip_val=None if size.fused and size.device == "cuda" else 1.0,  # which it refuses
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[Ticking(), *([] if run is None else [Guarded(run=run)])],
        )
        trainer.fit(Pretraining(), DataLoader(tokens(size), batch_size=size.rows))  # type: ignore[arg-type]


FRAMEWORKS: dict[str, Framework] = {"hf": hf, "accelerate": accelerate, "lightning": lightning}


def compared(blocks: list[Spent], base: list[Spent], field: str) -> dict[str, Any]:
    """The median ratio of a loop's blocks to the base's of the same round, less one, and where it lies."""
    pairs = [(getattr(mine, field), getattr(theirs, field)) for mine, theirs in zip(blocks, base, strict=True)]
    ratios = sorted(mine / theirs - 1 for mine, theirs in pairs)
    half = 0.98 * math.sqrt(len(ratios))  # ranks on either side of the median: 1.96 deviations of a coin's
    low, high = max(0, math.floor(len(ratios) / 2 - half)), min(len(ratios) - 1, math.ceil(len(ratios) / 2 + half))
    return {
        "step_ms": 1e3 * statistics.median(mine for mine, _ in pairs),
        "more": statistics.median(ratios),
        "more_ms": 1e3 * statistics.median(mine - theirs for mine, theirs in pairs),
        "interval": (ratios[low], ratios[high]),
        "rounds": len(ratios),
    }


def main() -> None:
    """Measure, print, keep."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS))
    words.add_argument("--blocks", type=int, default=14, help=f"rounds, of which the first {WARM} do not count")
    words.add_argument("--times", type=int, default=3, help="how often everything is made anew")
    words.add_argument("--block", type=int, default=10)
    words.add_argument("--width", type=int, default=128)
    words.add_argument("--layers", type=int, default=4)
    words.add_argument("--rows", type=int, default=8)
    words.add_argument("--length", type=int, default=128, help="tokens of a row")
    words.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    words.add_argument("--not-fused", action="store_true", help="an optimizer as torch makes it by default")
    words.add_argument("--out", type=Path)
    chosen = words.parse_args()
    size = Size(chosen.width, chosen.layers, chosen.rows, chosen.length, chosen.device, not chosen.not_fused)
    found: dict[str, Any] = {}
    where = torch.cuda.get_device_name() if size.device == "cuda" else f"{torch.get_num_threads()} threads"
    parameters = sum(parameter.numel() for parameter in llama(size).parameters())
    print(f"{platform.machine()}, torch {torch.__version__}, {where}")
    print(f"{parameters / 1e6:.1f}M parameters, {size.rows} x {size.length} tokens a step")
    for name in chosen.only:
        steps = chosen.blocks * chosen.block + 1
        made = [side_by_side(FRAMEWORKS[name], size, steps, chosen.block, each % 3) for each in range(chosen.times)]
        alone, guarded, control = ([block for loops in made for block in loops[role]] for role in range(3))
        print(f"\n{name}: {chosen.times} times {chosen.blocks} rounds of {chosen.block} steps")
        print("| loop | time | ms a step | ms more | more than alone | 95 % interval |\n|---|---|---|---|---|---|")
        both = [Spent(*map(statistics.mean, zip(*pair, strict=True))) for pair in zip(alone, control, strict=True)]
        for label, blocks, base in (("guarded", guarded, both), ("alone again (control)", control, alone)):
            for field in Spent._fields:
                told = found.setdefault(name, {}).setdefault(label, {})[field] = compared(blocks, base, field)
                low, high = told["interval"]
                print(
                    f"| {label} | {field} | {told['step_ms']:.2f} | {told['more_ms']:+.2f} "
                    f"| {told['more']:+.2%} | {low:+.2%} to {high:+.2%} |"
                )
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
