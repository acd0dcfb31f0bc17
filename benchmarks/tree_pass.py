"""What a verification pass over a tree costs beside one over a chain of as many tokens.

    python benchmarks/tree_pass.py [--dtype bfloat16] [--tiles] [--batch 3] [--prompt 300]

Both drafts propose random tokens, so that nearly every round commits one; the two take turns, and medians of their rounds are compared: of the
verification (forward, verdict and commit), which is what a tree adds something to, and of whole rounds.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from hf_specdec import enable, mx
from hf_specdec.bench.embedded import EMBEDDED, load_target
from hf_specdec.drafts import Context, Draft
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree


class RandomTree(Draft):
    """Random tokens as point masses in `tree`."""

    name = "random"

    def __init__(self, tree: Tree):
        self.tree, self.generator = tree, torch.Generator().manual_seed(0)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        tree = self.tree.truncate(max(k))
        tokens = torch.randint(0, context.vocab_size, (len(k), len(tree)), generator=self.generator).to(context.device)
        return Proposal(tree, tokens, None, [min(own, len(tree)) for own in k], self.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=EMBEDDED)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--tiles", action="store_true", help="weights in the kernels' tiles")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=300, help="tokens of the longest prompt; the others are shorter")
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    target, tokenizer = load_target(given.target, given.dtype)
    enable(mx.to_tiles(target) if given.tiles else target)
    drafts = {"chain of 16": RandomTree(Tree.chain(16)), "tree of 16": RandomTree(Tree((0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5, 5, 6, 8, 10, 11)))}
    lengths = [given.prompt * (row + 1) // given.batch for row in range(given.batch)]
    ids = torch.zeros((given.batch, given.prompt), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = torch.randint(0, len(tokenizer), (length,), generator=torch.Generator().manual_seed(row))
        mask[row, -length:] = 1
    verify = {name: [] for name in drafts}
    for _ in range(given.repetitions + 1):
        for name, draft in drafts.items():
            out = target.generate(ids, attention_mask=mask, assistant_model=draft, speculative=True, num_assistant_tokens=16, do_sample=False,
                                  max_new_tokens=40, min_new_tokens=40, pad_token_id=0, return_dict_in_generate=True)
            verify[name].append(out.speculation.seconds["verify"] / len(out.speculation.rounds))
    chain, tree = (statistics.median(values[1:]) for values in verify.values())
    ratios = sorted(b / a for a, b in zip(*(values[1:] for values in verify.values())))
    print(f"verification of a tree of 16 over that of a chain of 16: {tree / chain:.3f} (ratios of single calls {ratios[0]:.3f} to {ratios[-1]:.3f}), "
          f"{given.dtype}{', tiles' if given.tiles else ''}, batch {given.batch}, prompt {given.prompt}")


if __name__ == "__main__":
    main()
