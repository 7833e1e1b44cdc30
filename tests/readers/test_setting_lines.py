"""Settings that programs print about themselves, and the lines that are no rows."""

import itertools
from pathlib import Path

import pytest

from sealegs.readers import lines_kept
from sealegs.readers.read import read
from sealegs.record.run import Run

ROWS = "".join(f"step {step} | loss {3 - step / 100:.4f} | lr 1e-3\n" for step in range(30))

HEADERS = {
    "megatron": (
        "------------------------ arguments ------------------------\n"
        "  adam_beta2 ...................................... 0.95\n"
        "  bf16 ............................................ True\n"
        "  data_path ....................................... ['a_text', '0.3']\n"
        "  lr .............................................. 0.00015\n"
        "  micro_batch_size ................................ 2\n"
        "-------------------- end of arguments ---------------------\n",
        {"adam_beta2": 0.95, "bf16": True, "data_path": ["a_text", "0.3"], "lr": 0.00015, "micro_batch_size": 2},
    ),
    "labelled by rank": (
        "0:   clip_grad ....................... 1.0\n0:   seed ....... 3\n0:   fp16 ..... None\n",
        {"clip_grad": 1.0, "seed": 3, "fp16": None},
    ),
    "yaml": (
        "[INFO 2024-05-01 10:00:00 main:38] \n"
        "    ***** configuration *****\n"
        "    name: gpt\n"
        "    trainer:\n"
        "      devices: 8\n"
        "      precision: bf16-mixed\n"
        "      callbacks:\n"
        "      - timer\n"
        "      max_steps: 1000\n"
        "    model:\n"
        "      optim:\n"
        "        lr: 0.0003\n"
        "        betas: [0.9, 0.95]\n",
        {
            "name": "gpt",
            "trainer": {"devices": 8, "precision": "bf16-mixed", "callbacks": None, "max_steps": 1000},
            "model": {"optim": {"lr": 0.0003, "betas": [0.9, 0.95]}},
        },
    ),
    "namespace": (
        "Namespace(lr=3e-4, name='a, b', device=device(type='cuda'), betas=(0.9, 0.999), wandb_api_key='x', no=None)\n",
        {"lr": 3e-4, "name": "a, b", "device": {"type": "cuda"}, "betas": [0.9, 0.999], "no": None},
    ),
    "arguments over lines": (
        "Training/evaluation parameters TrainingArguments(\nadam_beta2=0.999,\nfp16=False,\nlearning_rate=5e-05,\n"
        "max_grad_norm=1.0,\nseed=42,\nstrategy=IntervalStrategy.STEPS,\n)\n",
        {
            "adam_beta2": 0.999,
            "fp16": False,
            "learning_rate": 5e-5,
            "max_grad_norm": 1.0,
            "seed": 42,
            "strategy": "IntervalStrategy.STEPS",
        },
    ),
    "printed dict, from a worker": (
        "(TaskRunner pid=4242) {'actor': {'clip_ratio': 0.2,\n"
        "(TaskRunner pid=4242)            'lr': 1e-06,\n"
        "(TaskRunner pid=4242)            'use_kl': True},\n"
        "(TaskRunner pid=4242)  'data': {'batch': 256, 'files': ['a', 'b']},\n"
        "(TaskRunner pid=4242)  'epochs': 15}\n",
        {
            "actor": {"clip_ratio": 0.2, "lr": 1e-6, "use_kl": True},
            "data": {"batch": 256, "files": ["a", "b"]},
            "epochs": 15,
        },
    ),
    "assignments": (
        "Overriding config with config/a.py:\n# reaches a loss of ~2.85\nbatch_size = 12 # per GPU\n\n"
        "steps = 5 * 8\nname = 'a'\nOverriding: batch_size = 16\n",
        {"batch_size": 16, "steps": 40, "name": "a"},
    ),
    "table": (
        "+--------+-------+\n| learning rate (LR)    | 6.0e-04  |\n| total_batch_size | 524288 |\n"
        "| LR scheduler | cosine |\n+--------+-------+\n",
        {"learning_rate": 6e-4, "total_batch_size": 524288, "lr_scheduler": "cosine"},
    ),
    "command line": (
        "+ torchrun --nproc_per_node 8 train.py --lr 3e-4 --weight-decay=0.1 --bf16 --name a model.depth=12\n",
        {"nproc_per_node": 8, "lr": 3e-4, "weight_decay": 0.1, "bf16": True, "name": "a", "model.depth": 12},
    ),
    "one line of pairs": (
        "engine/trainer: task=detect, mode=train, epochs=100, batch=16, lr0=0.01, amp=True\n",
        {"task": "detect", "mode": "train", "epochs": 100, "batch": 16, "lr0": 0.01, "amp": True},
    ),
}


def run_of(tmp_path: Path, text: str) -> Run:
    log = tmp_path / "train.log"
    log.write_text(text)
    return read(str(log)).run


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_becomes_the_settings_of_the_run(tmp_path: Path, name: str) -> None:
    header, wanted = HEADERS[name]
    run = run_of(tmp_path, f"starting\n{header}training\n{ROWS}")
    assert run.manifest.settings == wanted
    assert [line.text for line in run.lines if line.step is None][:1] == ["starting"]


@pytest.mark.parametrize(
    "text",
    [
        "def forward(\n    dim: int,\n    width: int,\n    base: float,\n):\n",  # a program's own source
        "accuracy: 0.5\nrecall: 0.3\nloss: 2.5\nprecision: 0.2\n",  # results
        "error: something went wrong here\nwarning: it did so again today\nhint: look at the other log\n",
        "{'a': 1}\n",
        "[INFO] a: b\n",
    ],
)
def test_what_is_no_header_is_not_taken_for_one(tmp_path: Path, text: str) -> None:
    assert run_of(tmp_path, text + ROWS).manifest.settings == {}


def test_results_between_rows_are_no_settings_and_a_second_header_is(tmp_path: Path) -> None:
    first, second = (f"lr: {lr}\nwidth: 64\nseed: 1\n" for lr in (0.1, 0.05))
    results = "accuracy: 0.5\nrecall: 0.3\nruntime: 3.5\n"
    run = run_of(tmp_path, first + ROWS + results + "starting again\n" + second + ROWS)
    assert run.manifest.settings == {"lr": 0.05, "width": 64, "seed": 1}


def test_a_block_that_never_ends_costs_no_rows(tmp_path: Path) -> None:
    run = run_of(tmp_path, "config = {'a': 1,\n" + ROWS)
    assert len(run.steps) == 30


def test_lines_that_are_no_rows_are_kept_with_the_step_they_stand_at(tmp_path: Path) -> None:
    rows = ROWS.splitlines(keepends=True)
    text = "begin\n" + "".join(
        row + f"WARNING: overflow {step}, skipping\n" * (step % 10 == 5) for step, row in enumerate(rows)
    )
    lines = run_of(tmp_path, text + "Killed\n").lines
    assert [(line.step, line.text, line.count) for line in lines] == [
        (None, "begin", 1),
        (5, "WARNING: overflow 5, skipping", 3),
        (29, "Killed", 1),
    ]


def test_the_lines_kept_are_bounded_and_errors_have_room_of_their_own() -> None:
    kept = lines_kept.LinesKept()
    words = ["".join(letters) for letters in itertools.product("bdfghjkpqz", repeat=4)]
    for row, word in enumerate(words):
        kept.see(f"plain {word}", row)
    kept.see("NCCL error: it timed out", 9000)
    for row, word in enumerate(words):
        kept.see(f"more {word}", 9001 + row)
    lines = kept.lines()
    assert len(lines) == lines_kept.MOST_ORDINARY + 1 + lines_kept.LAST
    assert lines_kept.KeptLine(9000, "NCCL error: it timed out", 1) in lines
    assert lines[-1].text == f"more {words[-1]}"
    assert [line.row for line in lines] == sorted(line.row for line in lines)
