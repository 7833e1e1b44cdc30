"""Opens the data of a run: finds, tokenises and caches what ``data.sources`` names.

Tokenised files need numpy alone. Text needs the ``tokenizers`` library, which is imported only then.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sealegs.batching.exclusions import LeftOut, read_list
from sealegs.batching.stratified import rare_tokens
from sealegs.errors import ConfigError, SourceError
from sealegs.lab import corpus
from sealegs.lab.data import Ints, Source, Stream, too_high
from sealegs.lab.settings import Settings
from sealegs.record.arrays import open_array, open_numbers
from sealegs.record.files import folder_aside, is_taken, writing
from sealegs.record.schema import TOKENIZER
from sealegs.stats.token_frequencies import entropy

_CORPUS_VERSION = 1  # raise when the generator or the tokenising changes: cached tokens are then made anew
_CORPUS_SEED = 0  # runs with different seeds read the same sentences, in another order
_TOKENISED = (".npy", ".bin")
_COUNTED = 1 << 24  # tokens of a source that are counted before the start
_SCANNED_TOKENS = 1 << 30  # ids are checked before the start up to here, and in every batch


@dataclass(frozen=True, slots=True)
class TokenSources:
    """The data of a run."""

    training: Stream
    held_out: Stream
    facts: dict[str, Any]
    """For the manifest: tokens, documents and fingerprint of each source, and the unigram entropy."""
    tokenizer: bytes | None
    """The tokenizer.json that made the tokens, if there is one."""


def open_data(settings: Settings, *, say: Callable[[str], None] = lambda _: None) -> TokenSources:
    """Open every source, split off what is held out, and make the streams."""
    sources, tokenizer = open_sources(settings, say)
    for source in sources:
        _refuse_unknown_ids(source, settings.model.vocabulary)
    parts = [source.split(settings.data.held_out) for source in sources]
    training, held_out = [part[0] for part in parts], [part[1] for part in parts]

    left_out = _left_out(sources, settings.data.leave_out)

    def stream(part: Sequence[Source], seed: int, **training: Any) -> Stream:
        return Stream(
            part,
            settings.data.sources,
            rows=settings.data.rows,
            batch=settings.data.batch,
            context=settings.model.context,
            vocabulary=settings.model.vocabulary,
            seed=seed,
            **training,
        )

    counts = {source.name: _counts(source, settings.model.vocabulary) for source in training}
    all_counted = all(len(source.tokens) <= _COUNTED for source in training)
    facts: dict[str, Any] = {
        "sources": {
            source.name: {
                "tokens": len(source.tokens),
                "documents": len(source.starts),
                "fingerprint": source.fingerprint(),
            }
            for source in sources
        },
        "unigram_entropy": _unigram_entropy(counts, settings),
    }
    for name, each in left_out.items():
        facts["sources"][name] |= {"dropped": len(each.dropped), "deferred": len(each.deferred)}
    rare = rare_tokens(sum(counts.values())) if all_counted else None  # type: ignore[arg-type]
    read = stream(training, settings.seed, is_stratified=settings.data.stratified, left_out=left_out, rare=rare)
    return TokenSources(read, stream(held_out, 0), facts, tokenizer)


def changed_source(before: Mapping[str, Any], data: TokenSources) -> str | None:
    """The name of the first source that is not what the manifest of a run says that it was, if there is one."""
    recorded = before.get("sources", {})
    if not isinstance(recorded, Mapping):
        return "data.sources in the manifest"
    return next((name for name, facts in recorded.items() if data.facts["sources"].get(name) != facts), None)


def _left_out(sources: Sequence[Source], path: str | None) -> dict[str, LeftOut]:
    """The documents of each source that a scan has listed."""
    if path is None:
        return {}
    listed = read_list(Path(path))
    found = {source.name: listed[source.name] for source in sources if source.name in listed}
    if not found:
        raise ConfigError(
            f"data.leave_out={path!r}: it lists documents of {', '.join(sorted(listed)) or 'nothing'}, and none of "
            f"data.sources is one of those: {', '.join(source.name for source in sources)}"
        )
    for source in sources:
        if source.name in found and found[source.name].documents != len(source.starts):
            raise SourceError(
                f"data.leave_out={path!r}: made for {found[source.name].documents} documents of {source.name}, which "
                f"has {len(source.starts)}; scan it anew"
            )
    return found


def open_sources(settings: Settings, say: Callable[[str], None]) -> tuple[list[Source], bytes | None]:
    """Every source whole, and the tokenizer.json that made the tokens, if there is one."""
    names = list(settings.data.sources)
    opened = {name: _open_tokenised(name) for name in names if Path(name).suffix in _TOKENISED}
    texts = [name for name in names if name not in opened]
    if not texts:
        return [opened[name] for name in names], None
    if opened and settings.data.tokenizer is None:
        raise ConfigError(
            f"data.sources mixes text ({texts[0]}) with token ids ({next(iter(opened))}): "
            "give data.tokenizer, the tokenizer.json that made the ids"
        )
    made, tokenizer = _tokenised(texts, settings, say)
    opened |= {source.name: source for source in made}
    return [opened[name] for name in names], tokenizer


def _open_tokenised(name: str) -> Source:
    path = Path(name)
    try:
        if path.suffix == ".bin":
            size = path.stat().st_size
            if size % 2:
                raise SourceError(f"{name}: {size} bytes, not a whole number of uint16 token ids; convert it to .npy")
            tokens = open_numbers(path, np.dtype(np.uint16))
        else:
            tokens = open_array(path)
    except OSError as error:
        raise SourceError(f"{name}: cannot be read ({error.strerror or error}); see data.sources") from error
    except ValueError as error:
        raise SourceError(f"{name}: not a numpy array file ({error}); see data.sources") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise SourceError(f"{name}: {tokens.ndim}-dimensional {tokens.dtype}, token ids are one row of whole numbers")
    if not len(tokens):
        raise SourceError(f"{name}: empty; give a file with token ids")
    return Source(name, tokens, _document_starts(path, len(tokens)))


def _document_starts(tokens: Path, count: int) -> NDArray[np.int64]:
    path = tokens.with_suffix(".starts.npy")
    if not path.exists():
        return np.zeros(1, np.int64)
    try:
        starts: NDArray[np.int64] = open_array(path).astype(np.int64)
        rises = starts.ndim == 1 and len(starts) > 0 and starts[0] == 0 and bool((np.diff(starts) > 0).all())
    except (OSError, ValueError) as error:
        raise SourceError(f"{path}: cannot be read ({error}); remove it, or save document starts in it") from error
    if not rises or starts[-1] >= count:
        raise SourceError(f"{path}: not the starts of documents: whole numbers that rise from 0 to below {count}")
    return starts


def _refuse_unknown_ids(source: Source, vocabulary: int) -> None:
    for start in range(0, min(len(source.tokens), _SCANNED_TOKENS), 1 << 24):
        part = source.tokens[start : start + (1 << 24)]
        if part.max() >= vocabulary:
            raise SourceError(too_high(source.name, int(part.max()), vocabulary))
        if part.dtype.kind == "i" and part.min() < 0:
            raise SourceError(f"{source.name}: token id {part.min()} is negative; token ids start at 0")


# Text


def _documents(name: str, settings: Settings) -> Iterator[str]:
    if name == "grammar":
        yield from corpus.grammar_sentences(_CORPUS_SEED, settings.data.sentences)
    elif name == "stdlib":
        yield from (text for _, text in corpus.stdlib_documents())
    else:
        yield from corpus.text_documents(Path(name))


def _identity(name: str, settings: Settings) -> str:
    """What a cache of this source's tokens depends on."""
    if name == "grammar":
        return f"grammar {settings.data.sentences}"
    if name == "stdlib":
        return f"stdlib {sys.version}"
    if Path(name).suffix != ".txt":
        raise SourceError(
            f"{name}: no such source; data.sources takes grammar, stdlib, or the path of a .txt, .npy or .bin file"
        )
    try:
        with Path(name).open("rb") as file:
            return f"text {hashlib.file_digest(file, 'blake2b').hexdigest()}"
    except OSError as error:
        raise SourceError(f"{name}: cannot be read ({error.strerror}); see data.sources") from error


def _tokenised(names: Sequence[str], settings: Settings, say: Callable[[str], None]) -> tuple[list[Source], bytes]:
    """The tokens of these text sources and the tokenizer that made them: from the cache, or made now."""
    from sealegs.lab import tokenizer as bpe

    vocabulary = settings.model.vocabulary
    given = bpe.load(Path(settings.data.tokenizer), vocabulary) if settings.data.tokenizer else None
    parts = [str(_CORPUS_VERSION), *(_identity(name, settings) for name in names)]
    parts.append(given.to_json() if given else str(vocabulary))
    folder = cache_folder() / "tokens" / hashlib.blake2b("\n".join(parts).encode(), digest_size=12).hexdigest()
    try:
        return _load_cached(folder, names)
    except (OSError, ValueError):  # not there yet, or cut short by a full disk or a copy
        say(f"tokenising {', '.join(names)} (kept in {folder} for next time)")
    tokenizer = given or bpe.train(chain.from_iterable(_documents(name, settings) for name in names), vocabulary)
    shutil.rmtree(folder, ignore_errors=True)
    with writing(f"{folder} (SEALEGS_CACHE names another place)"):
        try:
            with folder_aside(folder) as aside:
                tokenizer.save(aside / TOKENIZER)
                for i, name in enumerate(names):
                    tokens, starts = tokenizer.encode_documents(_documents(name, settings))
                    np.save(aside / f"{i}.npy", tokens)
                    np.save(aside / f"{i}.starts.npy", starts)
                made = _load_cached(aside, names)  # from here: another run may remove the folder to repair it
        except OSError as error:
            if not is_taken(error):  # otherwise another run was quicker with the same tokens
                raise
        return made


def _load_cached(folder: Path, names: Sequence[str]) -> tuple[list[Source], bytes]:
    tokenizer = (folder / TOKENIZER).read_bytes()
    if not tokenizer:
        raise ValueError("cut short")
    sources = [
        Source(
            name,
            open_array(folder / f"{i}.npy"),
            open_array(folder / f"{i}.starts.npy"),
        )
        for i, name in enumerate(names)
    ]
    return sources, tokenizer


def cache_folder() -> Path:
    """The folder that keeps tokens between runs: SEALEGS_CACHE, or the user's cache folder."""
    if given := os.environ.get("SEALEGS_CACHE"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sealegs"
    except RuntimeError:
        raise ConfigError("no home folder is known for this user: set SEALEGS_CACHE to a folder for tokens") from None


def _counts(source: Source, vocabulary: int) -> Ints:
    """How often the first tokens of a source have each id."""
    return np.bincount(source.tokens[:_COUNTED], minlength=vocabulary)


def _unigram_entropy(counts: Mapping[str, Ints], settings: Settings) -> float:
    """The loss of a model that knows only the frequency of each token: what training has to beat."""
    shares = np.zeros(settings.model.vocabulary)
    for name, each in counts.items():
        shares += settings.data.sources[name] * each / each.sum()
    return entropy(shares)
