"""Near-duplicates by datatrove's MinHash, in three stages of tasks: signatures, pairs in each bucket, clusters.

datatrove says which documents are alike. Which of them is kept is decided from their places in the corpus, so that it
does not depend on how many tasks there were. Imported by who asks for it: it needs datatrove.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.dedup.minhash import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupSignature,
)
from datatrove.utils.hashing import HashConfig
from datatrove.utils.text import TextNormConfig
from datatrove.utils.word_tokenizers import WordTokenizer

from sealegs.batching.stratified import Ints
from sealegs.errors import SealegsError
from sealegs.scan.blocks import Ids, TextDocuments
from sealegs.scan.counts import Clusters, document_key
from sealegs.scan.plan import READERS
from sealegs.scan.tasks import Stage, in_base
from sealegs.scan.text import texts
from sealegs.scan.work_folder import WorkFolder

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
_WORD = re.compile(f"[{_IDEOGRAPHS}]|[^\\s{_IDEOGRAPHS}]+")


@dataclass(frozen=True, slots=True)
class Alike:
    """When two documents are alike: parameters of the MinHash."""

    words: int = 5
    """Of a shingle."""
    buckets: int = 14
    hashes: int = 8
    """Of a bucket: two documents meet if all of one bucket are equal."""

    @property
    def name(self) -> str:
        """For folders."""
        return f"{self.words}-{self.buckets}-{self.hashes}"

    def config(self) -> MinhashConfig:
        """For datatrove. Numbers stay as they are: two tables of other numbers are no copies of each other."""
        plain = TextNormConfig(norm_numbers=False, norm_weekdays=False, norm_monthnames=False)
        return MinhashConfig(
            n_grams=self.words,
            num_buckets=self.buckets,
            hashes_per_bucket=self.hashes,
            norm_config=plain,
            hash_config=HashConfig(precision=64, hash_fc="sha1"),
        )


class Words(WordTokenizer):  # type: ignore[misc]
    """Words between blanks, and characters where a script has none; no model of a language."""

    def word_tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        """Not asked for."""
        return [text]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        """Not asked for."""
        return [(0, len(text))]


def stages(work: WorkFolder, tasks: int, alike: Alike) -> list[Stage]:
    """The three stages, for so many tasks of the first."""
    tasks = min(tasks, len(work.plan.bundles))
    folder = _folder(tasks, alike)
    at, config = work.store.address, alike.config()
    signatures = MinhashDedupSignature(at(f"{folder}/signatures"), config, language=Words())
    pairs = MinhashDedupBuckets(at(f"{folder}/signatures"), at(f"{folder}/pairs"), config=config)
    clusters = MinhashDedupCluster(at(f"{folder}/pairs"), at(f"{folder}/clusters"), config, save_cluster_id=True)
    read = partial(_documents, place=work.store.place, folder=folder)
    return [
        Stage(f"signatures-{alike.name}", (read, signatures), tasks),
        Stage(f"pairs-{alike.name}-of-{tasks:05d}", (pairs,), alike.buckets),
        Stage(f"clusters-{alike.name}-of-{tasks:05d}", (clusters,), 1),
    ]


def _folder(tasks: int, alike: Alike) -> str:
    return f"near/{alike.name}-of-{tasks:05d}"


def _documents(data: Any, rank: int, world: int, *, place: str, folder: str) -> Iterator[Document]:
    """The documents of a task, and when all have been taken, the key of each, aside."""
    work = WorkFolder.opened(place)
    keys: list[Ints] = []
    with in_base(work):
        for bundle in range(rank, len(work.plan.bundles), world):
            for part in work.plan.of_bundle(bundle):
                if part.trouble is not None:
                    continue
                for block in _read(part, work):
                    if isinstance(block, TextDocuments | Ids):
                        of = document_key(part.number, block.numbers)
                        keys.append(of)
                        yield from map(Document, _texts(block), map(str, of.tolist()))
    saved = io.BytesIO()
    np.save(saved, np.concatenate(keys) if keys else np.empty(0, np.int64))
    work.store.write(f"{folder}/keys/{rank:05d}.npy", saved.getvalue())


def _read(part: Any, work: WorkFolder) -> Iterator[Any]:
    """What can be read; the counting has named the rest."""
    try:
        yield from READERS[part.format](part, work.plan.ways)
    except (SealegsError, OSError):
        return


def _texts(block: TextDocuments | Ids) -> Iterator[str]:
    if isinstance(block, TextDocuments):
        yield from texts(block)
        return
    for ids in np.split(block.ids, block.starts[1:]):
        yield " ".join(map(str, ids.tolist()))


def clusters(work: WorkFolder, tasks: int, alike: Alike) -> Clusters:
    """What the stages have found."""
    tasks = min(tasks, len(work.plan.bundles))
    folder = _folder(tasks, alike)
    keys: list[Ints] = [np.empty(0, np.int64)]
    numbers: list[Ints] = [np.empty(0, np.int64)]
    for name in sorted(work.store.sizes(f"{folder}/clusters")):
        rank, _, kind = name.partition(".")
        if kind == "clusters":
            pairs = np.frombuffer(work.store.read(f"{folder}/clusters/{name}"), "<u4").reshape(-1, 2)
            saved = io.BytesIO(work.store.read(f"{folder}/keys/{int(rank):05d}.npy"))
            keys.append(np.load(saved, allow_pickle=False)[pairs[:, 0]])
            numbers.append(pairs[:, 1].astype(np.int64))
    return Clusters(np.concatenate(keys), np.concatenate(numbers))
