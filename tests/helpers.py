"""What the tests share: tiny models, ragged batches, plain generate as the reference, and drafts made for testing."""

from __future__ import annotations

import copy
import os
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

import hf_specdec
from hf_specdec.law import draw
from hf_specdec.drafts import Context, Draft
from hf_specdec.proposal import Proposal
from hf_specdec.tree import Tree
from tests.timm_stand_in import without_timm

FULL = os.environ.get("HF_SPECDEC_FULL") == "1"
OLD_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9)  # 2.7 and 2.8 do not compile everything: docs/performance.md
VOCAB = 61

_SIZE = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256)
_NO_SPECIAL = dict(bos_token_id=None, eos_token_id=None, pad_token_id=None)


@contextmanager
def torch_threads(count: int):
    """`count` threads, and afterwards as many as before."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)


@contextmanager
def torch_defaults(dtype: torch.dtype = torch.float32, device: str | None = None):
    """Another default dtype, or device, of torch's."""
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device) if device else nullcontext():  # set_default_device(None) leaves torch 2.7 without any
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def without_a_home(monkeypatch) -> None:
    """Python knows no folder of the user's, and the environment names none for caches."""
    for name in ("HF_SPECDEC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)


def build(config_class: str, seed: int = 0, attn: str = "sdpa", spread: float = 0.3, **settings):
    """A random model in float32 that is not stuck on one token: every weight matrix has standard deviation `spread`."""
    config = AutoConfig.for_model(config_class, **{**_NO_SPECIAL, **settings})
    torch.manual_seed(seed)
    auto = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModelForMultimodalLM
    with without_timm(config):
        model = auto.from_config(config, attn_implementation=attn).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, spread)
    model.generation_config.do_sample = False
    return model


def tiny_llama(seed: int = 0, **settings):
    return build("llama", seed, **{**_SIZE, **settings})


def small_vocabulary_llama(seed: int = 0, vocab: int = 7, **settings):
    """One layer, width 16: small enough to be sampled a hundred thousand times."""
    sizes = dict(vocab_size=vocab, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    return build("llama", seed, **{"spread": 0.45, **sizes, **settings})


def perturbed(model, scale: float = 0.05, seed: int = 1):
    """A copy whose matrices are off by `scale` of their size: a draft that is right some of the time."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            if parameter.ndim > 1:
                parameter += scale * float(parameter.std()) * torch.randn(parameter.shape, generator=generator)
    return other


def contrary(model):
    """A copy that likes most what the model likes least."""
    other = copy.deepcopy(model)
    other.set_output_embeddings(copy.deepcopy(other.get_output_embeddings()))
    with torch.no_grad():
        other.get_output_embeddings().weight.neg_()
    return other


def word_tokenizer(ids):
    """A tokenizer of the words "w0", "w1", ...: word number ids[i] has the id i."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{word}": i for i, word in enumerate(ids)}
    core = Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token=next(iter(words)), clean_up_tokenization_spaces=False)


def enabled(model):
    return hf_specdec.enable(model)


# --- prompts and the reference ----------------------------------------------------------------------------------------


def prompts(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Random prompts without token 0, which the tests use as padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocab, (length,), generator=generator).tolist() for length in lengths]


def repetitive(*lengths: int, seed: int = 0, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts that say everything twice, so that a lookup has something to find."""
    return [(row + row)[:length] for row, length in zip(prompts(*[(n + 1) // 2 for n in lengths], seed=seed, vocab=vocab), lengths)]


def padded(rows: list[list[int]], pad: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded input_ids and attention_mask."""
    width = max(map(len, rows))
    ids = [[pad] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def new_tokens(out, inputs, trace=None) -> list[list[int]]:
    """Generated tokens per row; with a trace, without the padding on the right."""
    sequences = out if torch.is_tensor(out) else out.sequences
    trace = trace or getattr(out, "speculation", None)
    tails = sequences[:, inputs["input_ids"].shape[1]:].tolist()
    return tails if trace is None else [tail[:n] for tail, n in zip(tails, trace.new_tokens)]


def plain(model, rows: list[list[int]], **options) -> list[list[int]]:
    """The reference: transformers' own generate, one row at a time."""
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, **options}
    out = []
    for row in rows:
        ids = torch.tensor([row])
        tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
        out.append(tokens[0, len(row):].tolist())
    return out


def speculate(model, rows: list[list[int]], draft=None, k: int | str = 4, seed: int | list[int] | None = None, **options):
    """Ours, all rows in one batch; returns the output object."""
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "speculative": {}, **options}
    if isinstance(options["speculative"], dict):
        options["speculative"] = {"seed": seed, **options["speculative"]}
    return enabled(model).generate(
        **padded(rows), assistant_model=draft, num_assistant_tokens=k, return_dict_in_generate=True, **options
    )


def generated(out, rows: list[list[int]]) -> list[list[int]]:
    """New tokens per row of an output of `speculate`."""
    return new_tokens(out, padded(rows))


def snapshot(model) -> tuple:
    """What a call must leave alone: weights, configs, attributes, hooks and mode."""
    return (
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        model.config.to_dict(), model.generation_config.to_dict(), sorted(vars(model)), model.training,
    )


def assert_unchanged(model, before: tuple) -> None:
    weights, *rest = snapshot(model)
    assert all(torch.equal(weights[name], tensor) for name, tensor in before[0].items()) and len(weights) == len(before[0])
    assert rest == list(before[1:])


# --- drafts made for testing ------------------------------------------------------------------------------------------


class Logged:
    """Before the class of a draft: writes down the rows and the proposal of every round, and the K of its rows."""

    def start(self, context: Context) -> None:
        super().start(context)
        self.log, self.k = [], []

    def propose(self, context: Context, k: list[int]) -> Proposal:
        proposal = super().propose(context, k)
        self.log.append(([list(row) for row in context.rows], proposal))
        self.k.append(k)
        return proposal


class ScriptedDraft(Draft):
    """Proposes what `script(row)` says should follow a row's tokens (a point mass), wrong every `wrong`-th token if given."""

    name = "scripted"

    def __init__(self, script, wrong: int = 0, vocab: int = VOCAB):
        self.script, self.wrong, self.vocab = script, wrong, vocab
        self.seen: list[list[list[int]]] = []

    @classmethod
    def knowing(cls, rows: list[list[int]], **settings) -> "ScriptedDraft":
        """Knows the finished texts `rows`, prompts included."""

        def script(tokens):
            return next((row[len(tokens):] for row in rows if row[: len(tokens)] == tokens), [])

        return cls(script, **settings)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        self.seen.append([list(row) for row in context.rows])
        rows = []
        for row, own in zip(context.rows, k):
            tokens = list(self.script(list(row)))[:own]
            rows.append([
                (token + 1) % self.vocab if self.wrong and (len(row) + i) % self.wrong == 0 else token
                for i, token in enumerate(tokens)
            ])
        return Proposal.from_lists(rows, context.device, self.name)


class TreeDraft(Draft):
    """A small tree of random tokens, a draft for tests only. Siblings are drawn without replacement, with `replacement`, or not
    drawn at all (`point_mass`)."""

    name = "tree"

    def __init__(self, parents: tuple[int, ...] = (0, 0, 1, 1, 2), point_mass=False, replacement=False, seed: int = 0):
        self.tree, self.point_mass, self.replacement = Tree(parents), point_mass, replacement
        self.bias = torch.randn(64, generator=torch.Generator().manual_seed(seed))

    def propose(self, context: Context, k: list[int]) -> Proposal:
        sizes = [min(own, len(self.tree)) for own in k]
        tree = self.tree.truncate(max(sizes))
        batch, n, vocab = len(context.rows), len(tree), context.vocab_size
        tokens, laws = torch.zeros(batch, n, dtype=torch.long), torch.zeros(batch, n, vocab)
        for node, parent in enumerate(tree.parents, start=1):
            law = self._law(context, tokens, node, parent)
            before = [other - 1 for other in range(1, node) if tree.parents[other - 1] == parent]
            if before and not self.replacement:
                law = law.scatter(1, tokens[:, before], 0.0)
                law = law / law.sum(-1, keepdim=True)
            laws[:, node - 1] = law
            tokens[:, node - 1] = law.argmax(-1) if self.point_mass else draw(law, context.noise(f"draft:{node}", 1)[:, 0])
        return Proposal(tree, tokens, None if self.point_mass else laws, sizes, self.name)

    def _law(self, context: Context, tokens: torch.Tensor, node: int, parent: int) -> torch.Tensor:
        """q depends on the token before and on the node, so that a mix-up of nodes shows."""
        before = torch.tensor([row[-1] for row in context.rows]) if parent == 0 else tokens[:, parent - 1]
        v = torch.arange(context.vocab_size)
        return torch.softmax(self.bias[(v + 3 * before[:, None] + 7 * node) % 64], dim=-1)


class KnowingTreeDraft(Draft):
    """A tree of point masses whose right branch (it knows the finished texts) has another rank at every depth, so that accepted
    paths have to be gathered; every `wrong`-th position has no right branch at all."""

    name = "knowing tree"

    def __init__(self, rows: list[list[int]], parents: tuple[int, ...] = (0, 0, 0, 1, 1, 2, 2, 5, 5, 7), wrong: int = 5, vocab: int = VOCAB):
        self.rows, self.tree, self.wrong, self.vocab = rows, Tree(parents), wrong, vocab

    def propose(self, context: Context, k: list[int]) -> Proposal:
        sizes = [min(own, len(self.tree)) for own in k]
        tree = self.tree.truncate(max(sizes))
        tokens = torch.tensor([self._tokens(row, tree) for row in context.rows], dtype=torch.long).reshape(len(k), len(tree))
        return Proposal(tree, tokens, None, sizes, self.name)

    def _tokens(self, row: list[int], tree: Tree) -> list[int]:
        future = next((text[len(row):] for text in self.rows if text[: len(row)] == row), [])
        tokens, right = [], {0}
        for node, (parent, rank) in enumerate(zip(tree.parents, tree.ranks), start=1):
            depth = tree.depths[node]
            siblings = sum(other == parent for other in tree.parents)
            truth = future[depth - 1] if depth <= len(future) else 1
            turn = (len(row) + depth) % siblings == rank and (len(row) + depth) % self.wrong
            if parent in right and turn:
                right.add(node)
            tokens.append(truth if node in right else (truth + 1 + rank) % self.vocab)
        return tokens
