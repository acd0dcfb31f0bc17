"""The slot cache: whatever was drafted, rejected or taken from a tree, the next logits are those of a fresh pass."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from hf_specdec.cached_model import CachedModel
from hf_specdec.head import head_at
from hf_specdec.proposal import Proposal
from hf_specdec.tap import watched
from hf_specdec.tree import Tree
from tests.architectures import FAMILIES
from tests.helpers import VOCAB, prompts, tiny_llama

CLOSE = dict(atol=2e-4, rtol=2e-4)
KINDS = {"full": "Llama", "sliding": "Mistral", "hybrid": "Gemma 3 (text)", "chunked": "Llama 4 (text, chunked)", "learned positions": "GPT-2",
         "one K/V head": "GPT-BigCode (one K/V head)", "latent": "DeepSeek-V3"}
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str):
    return next(family for family in FAMILIES if family.name == KINDS[kind]).model("eager")


@torch.no_grad()
def fresh(model, tokens: list[int]) -> torch.Tensor:
    """Logits after the last token, from a pass of its own."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def proposal(tree: Tree, batch: int, sizes: list[int] | None = None, seed: int = 0) -> Proposal:
    tokens = torch.randint(1, VOCAB, (batch, len(tree)), generator=torch.Generator().manual_seed(seed))
    return Proposal(tree, tokens, None, sizes or [len(tree)] * batch)


def check_scores(model, cached: CachedModel, rows: list[list[int]], drafted: Proposal) -> None:
    """Every node has the logits of its own path, alone."""
    with torch.no_grad():
        logits = cached.score(rows, drafted)
    for b, row in enumerate(rows):
        for node in range(drafted.sizes[b] + 1):
            path = [int(drafted.tokens[b, step - 1]) for step in drafted.tree.path(node)]
            assert torch.allclose(logits[b, node], fresh(model, row + path), **CLOSE), (b, node)


def take(cached: CachedModel, rows: list[list[int]], drafted: Proposal, leaves: list[int], extra: int = 5) -> None:
    """Accept the path to leaves[b] and append one more token."""
    on_path = torch.zeros(len(rows), len(drafted.tree) + 1, dtype=torch.bool)
    for b, leaf in enumerate(leaves):
        path = drafted.tree.path(leaf)
        on_path[b, [0, *path]] = True
        rows[b] += [int(drafted.tokens[b, step - 1]) for step in path] + [extra + b]
    cached.commit([int(path.sum()) for path in on_path], drafted.tree, on_path)


TREES = [Tree.chain(4), Tree((0, 0, 1, 1, 2, 4)), Tree((0, 0, 0, 0))]


@pytest.mark.share(1 / 4)
@every_kind
@pytest.mark.parametrize("tree", TREES, ids=["chain", "tree", "siblings"])
def test_every_node_of_every_ragged_row_has_the_logits_of_its_own_path_round_after_round(kind, tree):
    model, rows = made(kind), prompts(9, 3, 14)
    cached = CachedModel(model, 60)
    last = len(tree)
    for round, leaves in enumerate(([last, 0, 1], [0, last, last], [2, 1, 0])):
        drafted = proposal(tree, 3, seed=round)
        check_scores(model, cached, rows, drafted)
        take(cached, rows, drafted, leaves)
        assert cached.lengths == [len(row) - 1 for row in rows]
    check_scores(model, cached, rows, proposal(Tree.chain(0), 3))


@every_kind
def test_rows_may_propose_different_numbers_of_tokens(kind):
    model, rows = made(kind), prompts(9, 3, 14)
    cached = CachedModel(model, 60)
    for round, sizes in enumerate(([4, 0, 2], [0, 4, 1])):
        drafted = proposal(Tree.chain(4), 3, sizes, seed=round)
        check_scores(model, cached, rows, drafted)
        take(cached, rows, drafted, sizes)


@every_kind
def test_rejected_tokens_leave_no_trace(kind):
    model, rows = made(kind), prompts(9, 3)
    cached = CachedModel(model, 60)
    for round in range(4):
        drafted = proposal(Tree.chain(6), 2, seed=round)
        check_scores(model, cached, rows, drafted)
        take(cached, rows, drafted, [0, 0])


def test_rows_that_leave_do_not_disturb_those_that_stay():
    model, rows = made("full"), prompts(9, 3, 14)
    cached = CachedModel(model, 60)
    for stay in ([0, 2], [1]):
        drafted = proposal(Tree((0, 0, 1)), len(rows))
        check_scores(model, cached, rows, drafted)
        take(cached, rows, drafted, [3, 2, 0][: len(rows)])
        cached.keep(stay)
        rows = [rows[b] for b in stay]
    check_scores(model, cached, rows, proposal(Tree.chain(2), 1))


def test_a_row_forgets_what_is_cropped():
    model, rows = made("full"), prompts(9, 5)
    cached = CachedModel(model, 60)
    check_scores(model, cached, rows, proposal(Tree.chain(3), 2))
    take(cached, rows, proposal(Tree.chain(3), 2), [3, 3])
    cached.crop([10, 6])
    rows = [rows[0][:10] + [7, 8], rows[1][:6] + [9]]
    check_scores(model, cached, rows, proposal(Tree.chain(2), 2, seed=4))


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_short_row_beside_a_long_one_makes_no_nan_in_half_precision(attn, dtype):
    model = FAMILIES[0].model(attn).to(dtype)
    cached = CachedModel(model, 90)
    with torch.no_grad():
        logits = cached.score(prompts(70, 1), proposal(Tree((0, 0, 1)), 2))
    assert bool(logits.isfinite().all())


def test_one_round_is_one_forward_and_a_tree_on_a_new_prompt_two():
    model, rows = made("full"), prompts(9, 3)
    cached = CachedModel(model, 60)
    with torch.no_grad():
        cached.score(rows, proposal(Tree.chain(3), 2))
        assert cached.calls == 1
        cached.commit([1, 1], Tree.chain(3), torch.tensor([[True, False, False, False]] * 2))
        cached.score([row + [5] for row in rows], proposal(Tree((0, 0)), 2))
        assert cached.calls == 2
        other = CachedModel(model, 60)
        other.score(rows, proposal(Tree((0, 0)), 2))
    assert other.calls == 2


def test_the_head_works_at_the_places_asked_for_alone():
    """In a ragged batch every row's last place is another one: the head gets one place per row, and another thread's forward all of its own."""
    model, widths = made("full"), []
    model.lm_head.register_forward_hook(lambda head, inputs, output: widths.append(inputs[0].shape[1]))
    rows = [[5, 6, 7, 8, 9], [5, 6], [7, 8, 9]]
    cached = CachedModel(model, 20)
    with torch.no_grad():
        logits = cached.score(rows)
        assert logits.shape[:2] == (3, 1) and widths == [1]
        for row, own in zip(rows, logits):
            torch.testing.assert_close(own[0], model(torch.tensor([row])).logits[0, -1], rtol=1e-4, atol=1e-5)
        with head_at(model, torch.tensor([[0]])):
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(lambda: model(torch.tensor([[5, 6, 7]])).logits).result()
            assert other.shape[1] == 3 and model(torch.tensor([[5, 6, 7]])).logits.shape[1] == 1
        assert model(torch.tensor([[5, 6, 7]])).logits.shape[1] == 3
        model.get_output_embeddings = lambda: None
        torch.testing.assert_close(CachedModel(model, 20).score(rows), logits)


def test_what_layers_put_out_in_another_thread_is_not_shown_here():
    model, ids = tiny_llama(), torch.tensor([[3, 4, 5]])
    with ThreadPoolExecutor(1) as pool, watched([model.model.layers[0]]) as found:
        pool.submit(model, ids).result()
        assert not found
        model(ids)
    assert len(found) == 1 and found[0].shape[:2] == ids.shape


@pytest.mark.parametrize(("rows", "most"), [([[5, 6, 7] * 8], 1), ([[5, 6, 7] * 8, [9, 8, 7, 6] * 5], 5)], ids=["alone", "ragged"])
def test_layers_without_keys_of_their_own_see_the_ends_of_prompts_alone(rows, most):
    family = next(family for family in FAMILIES if family.name == "Gemma 4 (text)")
    model, widths = family.model(), []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, output: widths.append(args[0].shape[1]))
    cached = CachedModel(model, 64)
    logits = cached.score(rows)
    handle.remove()
    assert widths == [most if hasattr(type(model.model), "_maybe_slice_kv_shared_inputs") else 24]
    for row, own in zip(rows, logits):
        with torch.no_grad():
            torch.testing.assert_close(own[0], model(input_ids=torch.tensor([row])).logits[0, -1], atol=1e-4, rtol=1e-4)
