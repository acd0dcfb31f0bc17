"""A large synthetic datastore: how long it takes to build, to load, and to search.

    python benchmarks/datastore.py --tokens 100000000

The tokens are drawn with Zipf's frequencies, and passages are repeated, so that long matches exist. Searching means what a round does:
the longest match of a row's last tokens, and the tree of its most frequent continuations.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import numpy as np

from hf_specdec.drafts import RetrievalDraft
from hf_specdec.drafts.datastore import Datastore
from hf_specdec.drafts.retrieval import _most_frequent

VOCAB = 49_152


def synthetic(n: int, seed: int = 0) -> np.ndarray:
    """int32 [n]: Zipf tokens, a quarter of them passages of 64 that occur again."""
    generator = np.random.default_rng(seed)
    tokens = np.empty(n, np.int32)
    cdf = np.cumsum(1 / np.arange(1, VOCAB + 1))
    for at in range(0, n, 2**22):
        size = min(2**22, n - at)
        tokens[at : at + size] = np.searchsorted(cdf, generator.random(size) * cdf[-1])
    for _ in range(n // 256):
        source, target = generator.integers(0, max(n - 64, 1), 2)
        tokens[target : target + 64] = tokens[source : source + 64]
    return tokens


def timed(label: str, run):
    begin = perf_counter()
    result = run()
    print(f"{label}: {perf_counter() - begin:.1f} s", flush=True)
    return result


def search_times(store: Datastore, n: int = 2000, seed: int = 1) -> list[float]:
    """Milliseconds of n searches: half with rows from the text, half with random ones."""
    generator, draft, times = np.random.default_rng(seed), RetrievalDraft(store), []
    for i in range(n):
        at = int(generator.integers(0, max(len(store) - 64, 1)))
        row = store.tokens[at : at + 24].tolist() if i % 2 else generator.integers(0, VOCAB, 24).tolist()
        begin = perf_counter()
        match = store.match(row, draft.min_match)
        if match[0]:
            _most_frequent(store.continuations(*match, draft.DEPTH, draft.SAMPLES), 48, draft.branches)
        times.append(1e3 * (perf_counter() - begin))
    return times


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--searches", type=int, default=2000)
    parser.add_argument("--folder", type=Path, help="where the file goes for the length of the run (8 bytes per token)")
    given = parser.parse_args(arguments)
    documents = [timed(f"making {given.tokens} tokens", lambda: synthetic(given.tokens))]
    store = timed("building", lambda: Datastore.build(documents, VOCAB))
    documents.clear()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        path = timed("saving", lambda: store.save(Path(folder) / "store.safetensors"))
        loaded = timed("loading", lambda: Datastore.load(path))
        times = search_times(loaded, given.searches)
        print(f"searching: median {median(times):.3f} ms, 99 of 100 below {quantiles(times, n=100)[98]:.3f} ms")
        del loaded


if __name__ == "__main__":
    main()
