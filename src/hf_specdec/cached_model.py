"""A model with its cache: scores candidate tokens of all rows in one forward, and rolls back. Target and draft are both this.

The only file that knows positions and cache slots, and what is in sight of them. A pass feeds, per row, the committed tokens that are not cached yet
(the whole prompt at first, later the root alone: the last committed token) and then the nodes 1..N of a tree. What is at place
i of the block goes to slot `cached + i`; a node has the position of the root plus its depth.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from time import perf_counter

import torch
from transformers import DynamicCache, PreTrainedModel

from . import compat, passes
from .caches import read_cache
from .compiled import CompiledPasses, FixedBuffers
from .distributions import Drawing
from .head import READ, head_at, places_of
from .kv_cache import SlotCache
from .layerwise import TRIAL
from .lengths import check_counting, counts_itself
from .masks import Placing
from .media import Media, ahead
from .parts import read_at
from .proposal import Proposal
from .seq2seq import Decoder, Source
from .states import Checkpoints, StateLayer
from .tap import Tap, layers_of, show, watched
from .tree import Tree


class CachedModel:
    """limit: most slots a row can need. role: how errors name the model. source: what the decoder of an encoder-decoder reads.

    lengths: committed tokens per row whose keys and values are in the cache; where there are `states`, those that the states stand for.
    media: what the prompts show beside their text; the first pass reads it (`look`).
    ahead: per row, by how much the positions of its tokens exceed their number; [] where they are the same.
    fresh: per row, how many tokens before the candidates the last pass has fed, the root included.
    reader: called as reader(firsts, logits) in a pass over more than the root, with the logits [B, n, V] of the block's last n
        places, the first of which is position firsts[b] of row b; n is cut so that they are at most READ numbers. None: not wanted.
    embed: makes the inputs [B, L, H] of a pass from its tokens [B, L]; None: the model's own embedding does.
    taps: who sees what layers put out (`watch`).
    calls, seconds: forwards run, and the time they took on the host.
    compiled: the passes over fixed shapes, where compile=True; the prompt pass, and what does not compile, runs without.
    """

    def __init__(self, model: PreTrainedModel, limit: int, role: str = "target", traits: compat.ModelTraits | None = None,
                 source: Source | None = None, compile: bool | str = False):
        self.model, self.role = model, role
        self.run = model if source is None else Decoder(model, source)
        self.traits = traits or compat.traits_of(compat.unwrap(model), role)
        self.cache = SlotCache(limit, FixedBuffers(model, role) if compile else None, self.traits.states, StateLayer)
        self.states = Checkpoints(self.cache.layers, compat.unwrap(model)) if self.traits.states else None
        self.compiled = CompiledPasses(model, role, compile) if compile else None
        self.most, self.runner = passes.runner(model, compiled=False)
        if compile and (source is not None or self.traits.own_positions or counts_itself(compat.unwrap(model), limit)):
            self.compiled.give_up("it makes its masks or positions itself")
        self.device, self.dtype = compat.device_of(model), model.dtype
        self.media: Media | None = None
        self.lengths: list[int] = []
        self.ahead: list[int] = []
        self.fresh: list[int] = []
        self.reader: Callable[[list[int], torch.Tensor], None] | None = None
        self.embed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.taps: list[Tap] = []
        self.calls, self.seconds = 0, 0.0
        self.placing = Placing(self.traits, self.dtype, self.device)

    def room(self, rows: list[list[int]], room: list[int]) -> list[int]:
        """`room`, the tokens that each row may still get, such that drafted tokens stay in the model's context while the row does."""
        limit = self.traits.max_positions
        return [min(left, limit - len(row) + 1) if limit and len(row) <= limit else left for row, left in zip(rows, room)]

    def watch(self, layers: tuple[int, ...]) -> Tap:
        """Show, from now on, what these layers put out in every pass."""
        self.taps.append(Tap(layers))
        return self.taps[-1]

    def look(self, media: Media | None) -> None:
        """The first pass reads what the prompts show, too."""
        if media is not None:
            self.media, self.ahead = media, ahead(media.positions, media.columns, media.tokens.shape[1])

    @property
    def new(self) -> bool:
        """Whether the last pass had to be compiled first."""
        return self.compiled is not None and self.compiled.untried

    def beyond(self, rows: list[list[int]]) -> bool:
        """Whether the last token of a row lies beyond the model's context: it may have been generated, but cannot be fed."""
        return self.traits.max_positions is not None and max(map(len, rows), default=0) > self.traits.max_positions

    # --- forward passes -----------------------------------------------------------------------------------------------

    def score(self, rows: list[list[int]], proposal: Proposal | None = None) -> torch.Tensor:
        """Logits [B, N+1, V] after the root and after every candidate of `proposal` (None: nothing is proposed), where rows[b] are
        the committed tokens of row b. One forward; two for a tree that comes with more than one uncached token."""
        self.lengths = self.lengths or [0] * len(rows)
        if self.media is not None and not any(self.lengths):
            prompts = [row[: len(own)] for row, own in zip(rows, self.media.columns)]
            if prompts != rows:  # marks of images among what has been generated since are text
                self.feed(prompts)
        fresh = [row[length:] for row, length in zip(rows, self.lengths)]
        if proposal is None:
            proposal = Proposal.from_lists([[] for _ in rows], self.device)
        if (self.states is not None or self.media is not None) and not any(self.lengths):
            return self._start(fresh, proposal)
        apart = self.states is not None and len(fresh[0]) > Checkpoints.PENDING
        if (apart or not proposal.tree.is_chain) and max(map(len, fresh)) > 1:
            self.feed([tokens[:-1] for tokens in fresh])
            fresh = [tokens[-1:] for tokens in fresh]
        self.fresh, n = [len(tokens) for tokens in fresh], len(proposal.tree)
        sizes = [own + size for own, size in zip(self.fresh, proposal.sizes)]
        if max(self.fresh) == 1:
            root = torch.tensor(fresh, device=self.device)
            return self._forward(torch.cat([root, proposal.tokens.to(self.device)], dim=1), proposal.tree, sizes)
        tokens = self._padded(fresh, n)
        columns = torch.tensor(self.fresh, device=self.device)[:, None] + torch.arange(-1, n, device=self.device)
        tokens.scatter_(1, columns[:, 1:], proposal.tokens.to(self.device))
        return self._forward(tokens, proposal.tree, sizes, columns)

    def _start(self, prompts: list[list[int]], proposal: Proposal) -> torch.Tensor:
        """As `score`, of texts of which nothing is cached: a pass over them, whose states stay whatever is rejected and which sees what they show, and
        one over the candidates."""
        sizes = [len(tokens) for tokens in prompts]
        logits = [self._forward(self._padded(prompts, 0), None, sizes, torch.tensor(sizes, device=self.device)[:, None] - 1)]
        self.lengths, self.fresh = [size - 1 for size in sizes], [1] * len(sizes)
        if len(proposal.tree):
            logits.append(self._forward(proposal.tokens.to(self.device), proposal.tree, proposal.sizes, first=1))
        return torch.cat(logits, dim=1)

    def extend(self, tokens: torch.Tensor, advance: list[int]) -> torch.Tensor:
        """Feed one more token per row, int64 [B, 1]; logits [B, 1, V]. Row b keeps it if advance[b] is 1."""
        logits = self._forward(tokens.to(self.device), None, [1] * len(advance))
        self._keep([length + step for length, step in zip(self.lengths, advance)], settled=False)
        return logits

    def several(self, tokens: torch.Tensor, k: list[int], vocab: int, drawing: Drawing, uniform: torch.Tensor, embeds: tuple | None = None) -> tuple | None:
        """`extend` up to max(k) times by one compiled function (`compiled.several`), each time with the token that follows from the pass before; None
        where there is none. uniform: float64 [B, max(k)]. Row b keeps at most k[b] of the tokens fed."""
        n = 0 if self.compiled is None or self.compiled.places(1) is None else min(1 << max(k).bit_length() - 1, self.compiled.most_steps())
        if n < 2:
            return None
        begin, sizes = perf_counter(), [min(max(own, 0), n) for own in k]
        self.cache.plan.lay(self.lengths, n, self.device, whole=True)
        given = tokens.to(self.device), embeds, self.cache, layers_of(self.taps), vocab, drawing, uniform[:, :n].to(self.device)
        drawn = self.compiled.several(*given, **self._positions_and_masks(n, None, [max(size, 1) for size in sizes]))
        if drawn is not None:
            self.calls, self.seconds = self.calls + n, self.seconds + perf_counter() - begin
            self.lengths = [length + size for length, size in zip(self.lengths, sizes)]
        return drawn

    def grow(self, tokens: torch.Tensor, tree: Tree, first: int) -> torch.Tensor:
        """Feed the nodes first..first + m - 1 of a tree whose root, the last cached token, and earlier nodes have been fed: tokens
        int64 [B, m], logits [B, m, V]. `adopt` keeps a path; without it all of them are forgotten."""
        self.lengths = [length - 1 for length in self.lengths]
        try:
            return self._forward(tokens.to(self.device), tree.truncate(first + tokens.shape[1] - 1), [tokens.shape[1]] * len(tokens), first=first)
        finally:
            self.lengths = [length + 1 for length in self.lengths]

    def adopt(self, advance: list[int], tree: Tree, on_path: torch.Tensor) -> None:
        """Keep the first advance[b] nodes, below the root, of the path on_path [B, N+1] through a tree that `grow` has fed."""
        self.lengths, self.fresh = [length - 1 for length in self.lengths], [1] * len(advance)
        self.commit([1 + own for own in advance], tree, on_path)

    def feed(self, rows: list[list[int]]) -> None:
        """Cache tokens (ragged, some rows may have none) without asking for logits."""
        sizes = [len(tokens) for tokens in rows]
        tokens = self._padded(rows, 0)
        last = torch.full((len(rows), 1), tokens.shape[1] - 1, device=self.device)
        meant = [size or int(not length) for size, length in zip(sizes, self.lengths)]  # without one, the position of the last token: there may be no other
        self._forward(tokens, None, meant, last)
        self.lengths = [length + size for length, size in zip(self.lengths, sizes)]

    def _padded(self, rows: list[list[int]], extra: int) -> torch.Tensor:
        width = max(map(len, rows)) + extra
        return torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in rows], device=self.device)

    def _forward(self, tokens: torch.Tensor, tree: Tree | None, sizes: list[int], columns: torch.Tensor | None = None,
                 first: int = 0) -> torch.Tensor:
        """Logits at `columns` int64 [B, m] of the block, or at all of them; sizes[b]: places of row b that are meant. first: the node
        of the tree at which the block begins."""
        begin = perf_counter()
        most = None if self.reader is None else max(READ // (len(tokens) * self.traits.vocab_size), 1)
        wanted, columns = (None, None) if columns is None else places_of(columns, tokens.shape[1], most)
        apart = columns is not None and self.reader is None and self.compiled is None and self.traits.logits_to_keep \
            and len(wanted) > columns.shape[1]
        with head_at(self.model, columns if apart else None):
            logits = self._logits(tokens, tree, sizes, first, wanted)
        if columns is not None and logits.shape[1] == len(wanted):
            if self.reader is not None:
                self.reader([length + int(wanted[0]) for length in self.lengths], logits)
            logits = logits[torch.arange(len(sizes), device=logits.device)[:, None], columns.to(logits.device)]
        self.calls += 1
        self.seconds += perf_counter() - begin
        return logits

    def _logits(self, tokens: torch.Tensor, tree: Tree | None, sizes: list[int], first: int, wanted: torch.Tensor | None) -> torch.Tensor:
        """One forward; logits at the places `wanted` int64 [n] of the block, or at all of them."""
        width, starts, logits, layers = tokens.shape[1], [length + first for length in self.lengths], None, layers_of(self.taps)
        embeds = self.embed and self.embed(tokens)
        places = self.compiled.places(width) if self.compiled is not None and any(self.lengths) else None
        if places is not None:
            self.cache.plan.lay(starts, places, self.device, whole=True)
            done = self.compiled(tokens, embeds, self.cache, layers, **self._positions_and_masks(width, tree, sizes, first))
            logits, states = done or (None, [])
            if done and not self.compiled.untried:
                show(self.taps, states, starts)
                return logits if wanted is None else logits[:, wanted.to(logits.device)]
        self.cache.plan.lay(starts, width, self.device)
        seen = self.media is not None and not any(starts)
        inputs = self.media.first_pass(tokens, sizes, self.cache) if seen else self._positions_and_masks(width, tree, sizes, first)
        keep = wanted is not None and self.traits.logits_to_keep
        inputs |= {"logits_to_keep": wanted} if keep else {}
        inputs |= {compat.CACHE: self.cache, "use_cache": True, "return_dict": True}
        inputs |= {"input_ids": tokens} if embeds is None else {"inputs_embeds": embeds}
        if self.compiled is not None and not any(starts) and not seen:
            logits, states = self.compiled.start(self.run, inputs, layers, self._trial) or (None, [])
            if logits is not None and not self.compiled.untried:
                show(self.taps, states, starts)
                return logits if keep or wanted is None else logits[:, wanted.to(logits.device)]
        kept = nullcontext() if self.states is None else self.states.during(starts[0], starts[0] + width)
        with kept, watched(read_at(compat.unwrap(self.model), layers)) as states:
            reference = (self.runner(self.run, **inputs) if tokens.numel() <= self.most else self.run(**inputs)).logits
        show(self.taps, states, starts)
        reference = reference if keep or wanted is None else reference[:, wanted.to(reference.device)]
        if logits is not None:
            self.compiled.judge(logits if wanted is None or logits.shape == reference.shape else logits[:, wanted.to(logits.device)], reference)
        return reference

    def _trial(self, ragged: bool) -> None:
        """A pass over the first tokens of texts that nobody wants, with the compiled passes of this model."""
        trial = CachedModel(self.model, 2 * TRIAL, self.role, self.traits, compile=self.compiled.way)
        trial.compiled, trial.embed = self.compiled, self.embed
        text = [(7 * i + 1) % self.traits.vocab_size for i in range(TRIAL)]
        trial.score([text] + [text[: TRIAL - ragged]] * (len(self.lengths) - 1))

    # --- positions and masks ------------------------------------------------------------------------------------------

    def _positions_and_masks(self, width: int, tree: Tree | None, sizes: list[int], first: int = 0) -> dict:
        chain = tree is None or tree.is_chain
        if not chain and self.role == "target":  # a draft is exact whatever it computes
            check_counting(compat.unwrap(self.model), self.cache.plan.limit, self.role)
        if not chain and self.traits.own_positions:
            raise ValueError(compat.own_mask_refusal(self.model, self.role))
        inputs = self.placing(self.cache.plan, self.lengths, width, tree, sizes, first)
        if any(self.ahead) and "position_ids" in inputs:
            inputs["position_ids"] = inputs["position_ids"] + torch.tensor(self.ahead, device=self.device)[:, None]
        return inputs

    # --- rollback -----------------------------------------------------------------------------------------------------

    def commit(self, advance: list[int], tree: Tree | None = None, on_path: torch.Tensor | None = None) -> None:
        """Keep the first advance[b] nodes of the accepted path of row b (the root counts). What lies beyond is overwritten by
        the next block. A tree's path [B, N+1] is moved into place."""
        steps = max(advance)
        if tree is not None and not tree.is_chain and steps > 1:
            order = torch.where(on_path, torch.arange(on_path.shape[1], device=on_path.device), on_path.shape[1])
            nodes = order.sort(-1).values[:, 1:steps].clamp(max=len(tree))  # the root is in place
            starts = torch.tensor(self.lengths, device=nodes.device)[:, None]
            target, first = torch.arange(1, steps, device=nodes.device), 0
            if nodes.device.type == "cpu":  # elsewhere looking costs more than moving
                moved = (nodes != target).any(0).tolist()
                first = moved.index(True) if any(moved) else len(moved)
            for layer in self.cache.layers if first < steps - 1 else ():
                if layer.is_initialized:
                    layer.gather(starts + nodes[:, first:], starts + target[first:])
        self._keep([length + own - 1 + step for length, own, step in zip(self.lengths, self.fresh, advance)], settled=self.role == "target")

    def crop(self, lengths: list[int]) -> None:
        """Forget everything from position lengths[b] on in row b; all of it where that is below 0."""
        self._keep([max(min(own, new), 0) for own, new in zip(self.lengths, lengths)])

    def _keep(self, lengths: list[int], settled: bool = True) -> None:
        """What is cached of every row from now on; less where there are states, and none of just so many tokens. settled: as `Checkpoints.back_to` has it."""
        self.lengths = lengths if self.states is None else [self.states.back_to(length, settled) for length in lengths]

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        if self.media is not None and not any(self.lengths) and rows != list(range(len(self.lengths))):  # what is shown is of all rows
            self.media, self.ahead = None, []
        self.lengths, self.ahead = [self.lengths[row] for row in rows], [self.ahead[row] for row in rows] if self.ahead else []
        for layer in self.cache.layers:
            layer.keep(torch.tensor(rows, device=self.device))

    def load(self, cache: DynamicCache, columns: list[list[int]], cached: int) -> None:
        """Copy a caller's cache of `cached` columns; slot s of row b comes from column columns[b][s], the others are padding."""
        columns = [[column for column in row if column < cached] for row in columns]
        self.cache.load(read_cache(cache), columns, self.device)
        self.lengths = [len(row) for row in columns]

    def row(self, b: int, last: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is cached of row b, as `SlotCache.row` has it."""
        return self.cache.row(b, self.lengths[b], last)
