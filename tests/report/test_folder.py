"""A run folder in, its table of contents out."""

from pathlib import Path

from sealegs.report.folder import contents


def test_contents_are_listed_with_their_sizes(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(b"x" * 999)
    (tmp_path / "metrics.jsonl").write_bytes(b"x" * 12_340)
    (tmp_path / "checkpoints" / "200").mkdir(parents=True)
    (tmp_path / "checkpoints" / "200" / "a").write_bytes(b"x" * 2_000_000)
    (tmp_path / "unrelated").write_text("")
    assert contents(tmp_path) == [
        f"{tmp_path}/",
        "  manifest.json            999 B  what was run: settings, versions, machine, git state",
        "  metrics.jsonl          12.3 kB  a row a step",
        "  checkpoints/              2 MB  everything needed to run a step, by its number",
    ]
