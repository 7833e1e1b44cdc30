"""The scan as steps of a datatrove pipeline that is there already: one says what it sees, one leaves documents out.

    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from sealegs.scan.datatrove import LeaveOut, Scan

    LocalPipelineExecutor([JsonlReader("corpus"), Scan(), LeaveOut(), JsonlWriter("clean")], tasks=8).run()

A step sees one document after the other, so it finds what a document shows by itself. Duplicates, rare tokens and
near-duplicates are of a whole corpus: `sealegs scan` lists them, and ``LeaveOut`` takes its list.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.filters.base_filter import BaseFilter

from sealegs.batching.exclusions import LeftOut, read_list
from sealegs.errors import SourceError
from sealegs.scan.blocks import BLOCK_BYTES, joined
from sealegs.scan.encoder import encoder
from sealegs.scan.files import is_address, settled
from sealegs.scan.text import look_at_text

NAME = "sealegs"
"""Where in the metadata of a document it is said what was found: action, and why, as in the list of a scan."""
_AT_ONCE = 1000


class Scan(PipelineStep):  # type: ignore[misc]
    """Say in ``doc.metadata["sealegs"]`` what is wrong with each document that passes by, or nothing if it is sound.

    ``{"action": "drop" or "defer", "why": ["repeats: 3 words, 40 times on end"]}``. ``tokenizer`` is a tokenizer.json:
    spans and lengths are then those of its tokens.
    """

    name = "Sealegs scan"
    type = "sealegs"

    def __init__(self, *, longest: int = 32_768, tokenizer: str | None = None) -> None:
        super().__init__()
        self.longest = longest
        self.tokenizer = tokenizer

    def run(self, data: Iterable[Document], rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        """Annotate the documents of a task, a block of them at a time."""
        encode = encoder(self.tokenizer) if self.tokenizer else None
        for block in _blocks(iter(data)):
            texts = [each.text.encode(errors="surrogatepass") for each in block]
            with self.track_time(unit="block"):
                seen = look_at_text(joined(texts, range(len(block)), ""), 0, longest=self.longest, encode=encode)
            for each in block:
                each.metadata.pop(NAME, None)  # of an earlier scan
            for found in seen.findings:
                said = block[found.document].metadata.setdefault(NAME, {"action": found.action, "why": []})
                said["why"].append(f"{found.kind}: {found.text}")
                if found.action == "drop":
                    said["action"] = "drop"
                self.stat_update(found.kind)
            yield from block


def _blocks(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents in blocks that are small enough to count, in their order."""
    block: list[Document] = []
    size = 0
    for each in documents:
        block.append(each)
        size += len(each.text)
        if size > BLOCK_BYTES or len(block) == _AT_ONCE:
            yield block
            block, size = [], 0
    if block:
        yield block


class LeaveOut(BaseFilter):  # type: ignore[misc]
    """Leave out the documents that ``Scan`` has told to drop or, with ``listed``, those that the documents.jsonl of a
    `sealegs scan` tells to drop; ``deferred`` leaves out those to be read last, too.

    The list knows a document by its file and its number in it. datatrove's readers say the file in
    ``metadata["file_path"]``, and the number at the end of ``id``, where documents have no ``id`` of their own.
    """

    name = "Leave out what the scan named"
    type = "sealegs"

    def __init__(self, listed: str | None = None, *, deferred: bool = False, exclusion_writer: Any = None) -> None:
        super().__init__(exclusion_writer)
        self.listed = listed
        self.deferred = deferred
        self._left_out: dict[str, set[int]] | None = None
        if listed is not None:
            read_list(Path(listed))  # refused now, not in every task

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """Whether a document stays."""
        if self.listed is None:
            action = doc.metadata.get(NAME, {}).get("action")
            return (False, str(action)) if action == "drop" or (self.deferred and action == "defer") else True
        if self._left_out is None:  # once in each task
            self._left_out = {_place(file): self._numbers(each) for file, each in read_list(Path(self.listed)).items()}
        file, _, number = doc.metadata.get("file_path"), *str(doc.id).rpartition("/")[1:]
        if file is None or not number.isdecimal():
            raise SourceError(
                f"document {doc.id!r} of {file}: its number in the file is not known; give the reader an id_key that "
                "no document has, and leave add_file_path on"
            )
        if (known := self._left_out.get(_place(str(file)))) is None:
            raise SourceError(f"{file}: is not in {self.listed}; scan these files, under these names")
        return (False, "listed") if int(number) in known else True

    def _numbers(self, of_file: LeftOut) -> set[int]:
        return {*of_file.dropped.tolist(), *(of_file.deferred.tolist() if self.deferred else ())}


def _place(name: str) -> str:
    """One name for a file, wherever a path starts from."""
    name = settled(name)
    return name if is_address(name) else str(Path(name).absolute())
