"""The symptoms: each is made of cards that exist, is shown by an incident, and is found by the words of strangers."""

import re
import tomllib
from pathlib import Path

import pytest
from tests.diagnosis.streams import CASES, read_case

from sealegs.diagnosis.cause_cards import causes
from sealegs.diagnosis.symptoms import found, parsed, symptom_of, symptoms
from sealegs.errors import ConfigError

PATHS = {path.stem: path for path in CASES}
SPIKES = {"loss-spikes-and-comes-back", "loss-spikes-and-stays-high", "loss-spikes-again-and-again"}
NAN = {"nan-in-the-middle-of-training", "nan-from-the-first-step", "validation-loss-nan", "nan-on-some-batches"}
TITLES = [
    ("'loss': 0.0 and 'grad_norm' : nan during the fine-tune", {"grad-norm-nan-loss-zero"}),  # Florence-VL 9
    ("Loss=0 and grad_norm=nan when fine-tuning llava-v1.5-7b using dpo.sh", {"grad-norm-nan-loss-zero"}),  # LLaVA 359
    ("grad_norm Nan question", {"grad-norm-nan-loss-zero"}),  # ModernBERT 233
    ("grad_norm becomes nan when finetune 9b models", {"grad-norm-nan-loss-zero"}),  # Yi-Coder 12
    ("Loss reaches 0 when finetuning 7B model using 1xA100 80G", {"loss-is-exactly-zero"}),  # open_llama 75
    ("NaN validation loss while training the phase 1", {"validation-loss-nan"}),  # FAS-SGTD 16
    ("loss_value is NaN while training", NAN),  # deepsleepnet 43
    ("Nan loss after 70K steps on the pre-training.", NAN),  # yanmtt 7
    ("FP16 gives NaN loss when using pre-trained model", {"nan-from-the-first-step"}),  # pytorch 43556
    ("recovering from loss spikes strategies", SPIKES),  # Megatron-DeepSpeed 57
    ("discuss the solutions to Not fully recovering spikes", SPIKES),  # ml-engineering 32
    ("Investigate loss spikes", SPIKES),  # mistral 115
    ("Sudden spike in loss during stage 1 training", SPIKES),  # StreamVLN 35
    ("Weird spikes in the loss", SPIKES),  # audio-diffusion-pytorch 84
    (
        "How to handle gradient overflow when training a deep model with mixed precision?",
        {"fp16-loss-scale-keeps-halving"},
    ),  # apex 318
    ("[BUG] Loss difference when training with FP8 vs. BF16 MoE", {"fp8-diverges-bf16-does-not"}),  # Megatron-LM 1152
    (
        "Questions about accuracy alignment between BF16 and FP8",
        {"fp8-diverges-bf16-does-not"},
    ),  # TransformerEngine 1419
    ("--restore_training doesnt restore learning rate", {"learning-rate-restarts-after-resume"}),  # auto_coding 7
    (
        "Cosine LR scheduler can increase LR after resuming from backup",
        {"learning-rate-restarts-after-resume"},
    ),  # OneTrainer 1604
    ("llm finetuning is overfitting?", {"validation-loss-goes-up"}),  # transformers 22934
    ("Strange loss curve when `num_train_epoch`>1", {"loss-drops-at-every-epoch"}),  # InternVL 175
    ("GRPO: Why does loss start at 0 for first K steps and then increase over time?", {"loss-is-negative"}),  # trl 2703
    ("There may be some doubts about the advantage function of GRPO", {"grpo-loss-and-gradient-zero"}),  # trl 2976
    ("reward_mean converges, but kl is getting bigger and bigger", {"kl-explodes"}),  # trl 204
    ("Negative KL warning even if KL='abs' and KL='full'", {"kl-explodes"}),  # trl 1161
    ('Curves of "rewards_train/chosen"', {"dpo-rewards-chosen-decrease"}),  # RLHF-V 26
    ("Automatically detect the straggler.", {"training-is-slow-on-one-rank"}),  # dlrover 678
    ("[Bug]: NCCL hangs and causes timeout", {"nccl-watchdog-timeout"}),  # vllm 5484
    (
        "Why does CUDA out of memory occur after training several steps?",
        {"cuda-out-of-memory-after-many-steps"},
    ),  # Open-Sora 614
    (
        "CUDA out of memory in the middle of fine tuning",
        {"cuda-out-of-memory-after-many-steps"},
    ),  # Open-GroundingDino 74
]
"""Titles of issues in public repositories, with the pages that would have answered them."""
CHOSEN_BEFORE = tomllib.loads((Path(__file__).parent / "issue_titles.toml").read_text())["title"]


def test_every_cause_has_a_page() -> None:
    named = {name for each in symptoms().values() for name in each.causes}
    assert named == set(causes()) - {"unknown"}
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert f"[{len(symptoms())} symptoms](docs/symptoms/README.md)" in readme


def test_the_incident_of_a_page_has_one_of_its_causes() -> None:
    """That `check` finds it, and says what the page quotes, is a test of the case."""
    told = {each.name: read_case(PATHS[each.case]).expect["cause"] for each in symptoms().values() if each.case}
    assert len(told) >= 40
    assert [name for name, cause in told.items() if cause not in symptoms()[name].causes] == []


@pytest.mark.parametrize(("title", "pages"), TITLES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_strangers_title_finds_its_page(title: str, pages: set[str]) -> None:
    assert pages & {each.name for each in found(title, most=3)}


def test_most_titles_have_their_page_first() -> None:
    """None of them is written on its page word by word."""
    searched = {words.lower().strip(".?") for each in symptoms().values() for words in (each.title, *each.searched)}
    assert [title for title, _ in TITLES if title.lower().strip(".?") in searched] == []
    first = [title for title, pages in TITLES if found(title)[0].name in pages]
    assert len(first) >= 0.8 * len(TITLES), sorted({title for title, _ in TITLES} - set(first))


@pytest.mark.parametrize(
    ("is_held_out", "first", "among_three"),
    [(False, 12, 15), (True, 11, 15)],  # before any word was added for the first half: 12 and 14, 11 and 15
)
def test_titles_that_were_chosen_before_the_search_find_their_pages(
    is_held_out: bool, first: int, among_three: int
) -> None:
    half = [title for title in CHOSEN_BEFORE if title["held_out"] is is_held_out]
    assert len(half) == 15
    places = [[each.name in title["pages"] for each in found(title["text"], most=3)] for title in half]
    assert sum(place[0] for place in places) >= first
    assert sum(any(place) for place in places) >= among_three
    written = [title for title in half for each in symptoms().values() if title["text"] in (each.title, *each.searched)]
    assert written == []


def test_what_people_search_for_finds_the_page_that_says_so() -> None:
    for each in symptoms().values():
        for words in (each.title, *each.searched):
            assert each in found(words, most=3), words


@pytest.mark.parametrize(
    ("question", "page"),
    [
        ("My run diverged: why, and what do I do now?", "loss-spikes-and-stays-high"),
        ("training diverged", "loss-spikes-and-stays-high"),
        ("one rank gives nan", "one-rank-gives-nan"),
    ],
)
def test_a_question_that_says_no_more_than_a_page_has_it_first(question: str, page: str) -> None:
    assert found(question)[0].name == page


def test_words_that_say_nothing_find_nothing() -> None:
    assert found("why is it that") == []
    assert found("") == []


def test_a_cause_leads_to_the_symptom_that_names_it_earliest() -> None:
    shown = symptom_of("optimizer-reset")
    assert shown is not None
    assert shown.name == "loss-jumps-after-resume"
    assert symptom_of("unknown") is None


ONE = """
[[symptom]]
name = "a"
title = "A title"
searched = ["words"]
usually = "This."
causes = ["{cause}"]
command = "sealegs check train.log"
tells = "That."
by_hand = ["Look."]
first = "Wait."
"""


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (ONE.format(cause="no-such-card"), "a names no-such-card; causes.toml has no such card"),
        (ONE.format(cause="plateau") * 2, "two symptoms are called a; give one another name"),
        (ONE.format(cause="plateau") + "other = 1", "unknown field `other`"),
        (ONE.replace('"{cause}"', ""), "a has neither causes nor reasons; name what brings it"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parsed(text)
