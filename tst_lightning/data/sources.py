"""The corpora that a run reads: one, or a mixture with weights. Standard library only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from tst_lightning.data.corpus import Corpus
from tst_lightning.data.order import weight_faults
from tst_lightning.errors import UserError


@dataclass(frozen=True)
class DataSource:
    """One corpus of a mixture.

    Attributes:
        path: a directory made by ``tst-lightning prepare``, or its ``s3://`` or ``gs://`` URL.
        weight: its share of the windows; the weights of a mixture need not add up to 1.
        name: what its held-out loss is called in the log; the directory's name by default.
    """

    path: str
    weight: float = 1.0
    name: str | None = None


def source_names(sources: Sequence[DataSource]) -> list[str]:
    """What each source is called: its name, else the shortest end of its path that no other has."""
    parts = [PurePosixPath(source.path).parts for source in sources]
    length = 1
    while True:
        names = [s.name or "/".join(p[-length:]).strip("/") for s, p in zip(sources, parts, strict=True)]
        if len(set(names)) == len(names) or length >= max(map(len, parts)):
            return names
        length += 1


def chosen_sources(path: str | None, sources: Sequence[DataSource] | None) -> tuple[DataSource, ...]:
    """The sources that ``data.path`` or ``data.sources`` names.

    Raises:
        UserError: naming every fault at once.
    """
    if (path is None) == (sources is None):
        given = "neither is" if path is None else "both are"
        raise UserError(f"give data.path for one corpus or data.sources for a mixture, one of them: {given} given")
    chosen = (DataSource(path),) if path is not None else tuple(sources or ())
    if not chosen:
        raise UserError("data.sources is empty: name at least one corpus, as {path: DIR, weight: 1}")
    faults = weight_faults([source.weight for source in chosen])
    for what, values in (
        ("path", [source.path.rstrip("/") for source in chosen]),
        ("name", source_names(chosen)),
    ):
        faults += [
            f"data.sources: {count} of them have the {what} {value}: give each one of its own"
            for value, count in Counter(values).items()
            if count > 1
        ]
    faults += [f"data.sources: name={source.name!r} must not be empty" for source in chosen if source.name == ""]
    if faults:
        raise UserError(dict.fromkeys(faults))
    return chosen


def load_corpora(sources: Sequence[DataSource]) -> tuple[Corpus, ...]:
    """Their sidecars, held against each other.

    Raises:
        UserError: naming every fault at once.
    """
    corpora: list[Corpus] = []
    faults: list[str] = []
    for source in sources:
        try:
            corpora.append(Corpus.load(source.path))
        except UserError as error:
            faults += error.faults
    for source, corpus in zip(sources, corpora, strict=False) if not faults else ():
        first = corpora[0]
        for key in ("tokenizer_sha256", "end_of_text", "dtype"):
            if getattr(corpus, key) != getattr(first, key):
                faults.append(
                    f"{source.path} and {sources[0].path} were tokenised differently ({key} is {getattr(corpus, key)} "
                    f"and {getattr(first, key)}): prepare both with the same --tokenizer, such as "
                    f"{sources[0].path}/tokenizer.json"
                )
                break
    if faults:
        raise UserError(faults)
    return tuple(corpora)
