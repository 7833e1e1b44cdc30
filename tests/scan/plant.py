"""A corpus with known problems in it, made by someone who knows nothing of the scan.

    python tests/scan/plant.py FOLDER [--seed 0] [--documents 400]

Writes clean documents of invented words, problems at random places among them, and traps: documents that look like a
problem and are none. The same documents as corpus.txt, corpus.jsonl, corpus.parquet and as a dataset; truth.json
says which numbers have which problem.
"""

import argparse
import json
import random
from pathlib import Path

CONSONANTS, VOWELS = "bcdfghklmnprstvz", "aeiou"


def invented(draw: random.Random, count: int) -> list[str]:
    """Words of two to four syllables."""
    return [
        "".join(draw.choice(CONSONANTS) + draw.choice(VOWELS) for _ in range(draw.randint(2, 4))) for _ in range(count)
    ]


def sentence(draw: random.Random, words: list[str]) -> str:
    """Eight to thirty of them, some accented, with marks between."""
    chosen = [draw.choice(words) for _ in range(draw.randint(8, 30))]
    chosen[draw.randrange(len(chosen))] += draw.choice(["é", "ü", "\u2019s", ",", ";", ' ("ä")'])
    return " ".join(chosen).capitalize() + draw.choice([".", "!", "?", "…"])


def clean(draw: random.Random, words: list[str], number: int) -> str:
    """A document like no other: it has its number in it."""
    lines = [sentence(draw, words) for _ in range(draw.randint(1, 6))]
    return f"Document {number}: " + "\n".join(lines)


def traps(draw: random.Random, words: list[str]) -> list[str]:
    """Near the limit, and on its right side."""
    span = [*draw.sample(words, 4)]
    return [
        " ".join(span * 31) + " end.",  # one short of 32
        " ".join(f"{word} {number}" for number, word in enumerate(draw.choices(words[:3], k=200))),
        "xy" * 499 + "x" + " " + sentence(draw, words),
        "Ruler\n" + "-" * 400 + "\n" + sentence(draw, words) * 5,
        "Titles: «CAFÉ» and “BEYONCÉ\u2019S”, «NÃO», À…, 30 °C, £5, ½, naïve, Ærø, señor.",
        "日本語の文章には空白がありません。" * 3 + "".join(chr(0x4E00 + draw.randrange(5000)) for _ in range(1500)),
        "Русский текст без ошибок, здесь всё в порядке. Ελληνικά επίσης. עברית. 🚢🌊",
        "\tIndented\twith\ttabs\r\nand returns\r\n" + sentence(draw, words),
        "=+-*/" * 30,  # marks, but few of them
        "Step 1. " + sentence(draw, words),
        "Step 2. " + sentence(draw, words),
        json.dumps({"a": [1, 2, 3], "b": {"c": None}, "words": draw.sample(words, 20)}),
    ]


def problems(draw: random.Random, words: list[str], earlier: str) -> list[tuple[str, str]]:
    """Each with the kind that it is."""
    one, two, three = draw.choice(words), draw.sample(words, 2), draw.sample(words, 13)
    text = sentence(draw, words)
    accented = "The naïve café “owner” — señor Müller\u2019s — über-élégant, déjà vu."
    return [
        ("repeats", f"{text} " + " ".join([one] * 32)),
        ("repeats", " ".join(two * 60) + f" {text}"),
        ("repeats", f"{text} " + " ".join(three * 33) + f" {text}"),
        ("repeats", ("0, " * 40) + text),
        ("mojibake", accented.encode().decode("latin-1")),
        ("mojibake", accented.encode("utf-8").decode("cp1252", "ignore")),
        ("mojibake", f"{text} It was the owner\u2019s.".encode().decode("cp1252", "ignore")),
        ("mojibake", "Русский текст".encode().decode("latin-1") + " " + text),
        ("replaced", text[:20] + "\ufffd\ufffd" + text[20:]),
        ("control", text[:10] + "\x00" + text[10:]),
        ("control", text + "\x1b[31mred\x1b[0m"),
        ("control", text[:12] + "\x93quoted\x94 " + text[12:]),  # the C1 characters of a Windows text
        ("unbroken", text + " " + "".join(draw.choice("0123456789abcdef") for _ in range(3000))),
        ("symbols", " ".join("".join(draw.choice("=+-*/<>|#@") for _ in range(9)) for _ in range(60))),
        ("duplicate", earlier),
        ("duplicate", earlier + "\n"),
        ("over-long", " ".join(f"{draw.choice(words)}{number}" for number in range(5200))),
    ]


def planted(seed: int, documents: int) -> list[tuple[str | None, str]]:
    """Documents in order, each with its problem, or None."""
    draw = random.Random(seed)  # noqa: S311 - no secrets
    words = invented(draw, 800)
    made: list[tuple[str | None, str]] = [(None, clean(draw, words, number)) for number in range(documents)]
    made += [(None, trap) for trap in traps(draw, words)]
    draw.shuffle(made)
    for kind, text in problems(draw, words, made[3][1]):
        made.insert(draw.randrange(10, len(made)), (kind, text))
    return made


def write_dataset(folder: Path, table: object) -> None:
    """As Hugging Face's ``Dataset.save_to_disk`` lays it out: Arrow streams, and two JSON files about them."""
    import pyarrow as pa

    folder.mkdir()
    assert isinstance(table, pa.Table)
    names = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    half = table.num_rows // 2
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part, max_chunksize=100)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {"text": {"dtype": "string", "_type": "Value"}}}))


def write(folder: Path, seed: int, documents: int) -> None:
    """All formats, and the truth."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    made = planted(seed, documents)
    truth: dict[str, dict[int, str]] = {}

    def keep(name: str, kept: list[tuple[str | None, str]]) -> list[str]:
        truth[name] = {number: kind for number, (kind, _) in enumerate(kept) if kind is not None}
        return [text for _, text in kept]

    folder.mkdir(parents=True, exist_ok=True)
    as_text = keep("corpus.txt", [each for each in made if "\n\n" not in each[1]])
    (folder / "corpus.txt").write_bytes("\n\n".join(as_text).encode())
    with_empty = [*made[:50], ("empty", ""), *made[50:90], ("empty", " \n\t"), *made[90:]]
    as_lines = keep("corpus.jsonl", with_empty)
    (folder / "corpus.jsonl").write_text(
        "".join(json.dumps({"id": n, "text": text, "meta": {"n": n}}) + "\n" for n, text in enumerate(as_lines))
    )
    table = pa.table({"n": range(len(as_lines)), "text": keep("corpus.parquet", with_empty)})
    pq.write_table(table, folder / "corpus.parquet", row_group_size=150)
    write_dataset(folder / "dataset", table)
    half = len(with_empty) // 2
    keep("dataset/data-00000-of-00002.arrow", with_empty[:half])
    keep("dataset/data-00001-of-00002.arrow", with_empty[half:])
    (folder / "truth.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--documents", type=int, default=400)
    options = parser.parse_args()
    write(options.folder, options.seed, options.documents)
