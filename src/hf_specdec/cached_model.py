"""A model with its cache: scores candidate tokens of all rows in one forward, and rolls back. Target and draft are both this.

A pass (`Forward`) feeds, per row, the committed tokens that are not cached yet
(the whole prompt at first, later the root alone: the last committed token) and then the nodes 1..N of a tree. What is at place
i of the block goes to slot `cached + i`; a node has the position of the root plus its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter

import torch
from transformers import DynamicCache, PreTrainedModel

from .caches import read_cache
from .compat import ModelTraits
from .distributions import Drawing
from .forward import Forward
from .media import Media, ahead
from .positions import outgrown
from .proposal import Proposal
from .seq2seq import Decoder, Source
from .tap import layers_of
from .tree import Tree
from .uploads import upload


class CachedModel(Forward):
    """lengths: committed tokens per row whose keys and values are in the cache; where there are `states`, those that the states stand for.
    fresh: per row, how many tokens before the candidates the last pass has fed, the root included.
    padding: per prompt, its padding, where the model takes that for text; [] elsewhere. The rest is what `Forward` has.
    """
    chains = False  # whether drafts are to propose chains alone

    def __init__(self, model: PreTrainedModel, limit: int, role: str = "target", traits: ModelTraits | None = None, source: Source | None = None,
                 compile: bool | str = False, elsewhere=None):  # an Elsewhere
        super().__init__(model, limit, role, traits, source, compile if elsewhere is None else False, elsewhere)
        self.fresh: list[int] = []
        self.chunk: int | None = None
        self.padding: list[list[int]] = []
        self.told = False  # whether the last pass was no plain step although nothing was proposed: states had to be told what has been committed

    @property
    def new(self) -> bool:
        """Whether the last pass had to be compiled first."""
        return self.compiled is not None and self.compiled.untried

    def room(self, rows: list[list[int]], room: list[int]) -> list[int]:
        """`room`, the tokens that each row may still get, such that drafted tokens stay in the model's context while the row does; where blocks of all rows end
        in the same columns, of which MPT and GPT-Neo have no more than positions, while the longest row does."""
        limit = self.traits.max_positions
        if self.elsewhere is not None:
            room = [min(left, self.elsewhere.room(length)) for left, length in zip(room, self.lengths or [0] * len(room))]
        if limit and self._in_columns and max(map(len, rows)) <= limit:
            return [min(left, limit - max(map(len, rows)) + 1) for left in room]
        return [min(left, limit - len(row) + 1) if limit and len(row) <= limit else left for row, left in zip(rows, room)]

    @property
    def _in_columns(self) -> bool:
        """Whether the columns in which all blocks end are no more than positions are: not so under flash attention, which knows no positions."""
        return self.cache.plan.aligned and self.traits.encoder == "none" and not (self.traits.flash and self.traits.placed)

    def together(self, rows: list[list[int]], k: list[int]) -> list[int]:
        """`k`, the tokens to draft for each row, such that rows whose states have not read all that is committed make the pass no wider: such a row is fed
        that, and gets fewer candidates. So all rows are equally long, and where all candidates are accepted the states are those after the pass."""
        if self.states is None or len(rows) == 1 or not any(k) or not any(self.lengths):
            return k
        waiting = [len(row) - length for row, length in zip(rows, self.lengths)]
        width = max(1 + max(k), *waiting)
        return self.states.together(waiting, k) if self.traits.own_cache else [min(own, width - n) for own, n in zip(k, waiting)]

    def look(self, media: Media | None, chunk: int | None = None) -> None:
        """The first pass reads what the prompts show, too. chunk: how many tokens of a row a pass reads at most (transformers' prefill_chunk_size); all where there
        are states, or something is shown."""
        self.chunk = chunk or self.chunk
        if media is not None:
            self.media, self.ahead, self.sight = media, ahead(media.positions, media.columns, media.tokens.shape[1]), media.sight()

    def beyond(self, rows: list[list[int]]) -> bool:
        """Whether the last token of a row lies beyond the model's context: it may have been generated, but cannot be fed."""
        return self.traits.max_positions is not None and max(map(len, rows), default=0) > self.traits.max_positions

    # --- forward passes -----------------------------------------------------------------------------------------------

    def score(self, rows: list[list[int]], proposal: Proposal | None = None) -> torch.Tensor:
        """Logits [B, N+1, V] after the root and after every candidate of `proposal` (None: nothing is proposed), where rows[b] are
        the committed tokens of row b. One forward; two at the start where there are states or images, and for a tree that comes with more than one uncached
        token; with states, more of them where rows that propose nothing have unequal numbers of uncached tokens. ValueError for a text that has outgrown
        a table of positions, which is not refused before: it might have ended in time."""
        try:
            if self.counting and outgrown(self.counting, max(len(row) + own for row, own in zip(rows, self.ahead or [0] * len(rows)))):
                raise IndexError("positions out of bounds")
            return self._score(rows, proposal)
        except (IndexError, RuntimeError) as error:  # the latter from BERT's kind
            if not self.beyond(rows) or not isinstance(error, IndexError) and "out of bounds" not in str(error):
                raise
            most = self.traits.max_positions
            raise ValueError(f"max_new_tokens: a text has outgrown the {most} positions that {type(self.model).__name__} has for it; with its prompt it may have {most + 1} "
                             f"tokens at most. Ask for fewer.") from error

    def raw(self, logits: torch.Tensor) -> torch.Tensor:
        """What of the logits of the last `score` a call returns as its logits."""
        return logits

    def _score(self, rows: list[list[int]], proposal: Proposal | None) -> torch.Tensor:
        self.lengths = self.lengths or [0] * len(rows)
        if self.media is not None and not any(self.lengths):
            prompts = [row[: len(own)] for row, own in zip(rows, self.media.columns)]
            if prompts != rows:  # marks of images among what has been generated since are text
                self._start(prompts, Proposal.from_lists([[] for _ in rows], self.device))
                self.commit([1] * len(rows))
        fresh = [row[length:] for row, length in zip(rows, self.lengths)]
        if proposal is None:
            proposal = Proposal.from_lists([[] for _ in rows], self.device)
        if self._begins:
            return self._start(fresh if self.media is not None else self._in_chunks(fresh), proposal)
        fresh = self._not_apart(fresh, proposal)
        self.fresh, n = [len(tokens) for tokens in fresh], len(proposal.tree)
        sizes = [own + size for own, size in zip(self.fresh, proposal.sizes)]
        if max(self.fresh) == 1:
            root = upload(fresh, self.device)
            return self._forward(torch.cat([root, proposal.tokens.to(self.device)], dim=1), proposal.tree, sizes)
        tokens = self._padded(fresh, n)
        columns = torch.tensor(self.fresh, device="cpu")[:, None] + torch.arange(-1, n, device="cpu")  # on the host, where they are looked at
        tokens.scatter_(1, upload(columns[:, 1:], self.device), proposal.tokens.to(self.device))
        width = max(sizes)  # a row with more fresh tokens may have fewer candidates
        return self._forward(tokens[:, :width], proposal.tree, sizes, columns.clamp(max=width - 1))

    @property
    def _begins(self) -> bool:
        """Whether the next pass is the one over the prompts, and is to be by itself: states have to be kept as it leaves them, and it alone reads what is shown."""
        if any(part is not None and not part.begun for part in (self.states, self.elsewhere)):
            return True
        return (self.states is not None or self.media is not None) and not any(self.lengths)

    def _not_apart(self, fresh: list[list[int]], proposal: Proposal) -> list[list[int]]:
        """Those of the `fresh` tokens that go into a pass with the candidates: all, or the last of each row where the others have had to be fed apart."""
        fresh = self._within_context(self._in_chunks(fresh))
        several, sizes = max(map(len, fresh)) > 1, proposal.sizes
        apart = several and not proposal.tree.is_chain
        if self.states is not None:
            self.told, self.states.final = several and not any(sizes), False
            apart = apart or several and self.states.apart(fresh, sizes)
        if apart:
            before = self.lengths
            self.feed([tokens[:-1] for tokens in fresh])
            fresh = [tokens[now - own :] for tokens, own, now in zip(fresh, before, self.lengths)]
        if self.states is not None:
            self.states.final = self.role == "target" and not any(sizes) and len(set(map(len, fresh))) == 1
        return fresh

    def _in_chunks(self, fresh: list[list[int]]) -> list[list[int]]:
        """What is left of the `fresh` tokens for the last pass; what is before is fed."""
        while self.states is None and 0 < (self.chunk or 0) < max(map(len, fresh)):
            now = [tokens[: min(len(tokens) - 1, self.chunk)] for tokens in fresh]
            self.feed(now)
            fresh = [tokens[len(own) :] for tokens, own in zip(fresh, now)]
        return fresh

    def _within_context(self, fresh: list[list[int]]) -> list[list[int]]:
        """What of the `fresh` tokens fits behind the longest row where `room` goes by it; the rest is fed before."""
        limit = self.traits.max_positions if self._in_columns else None
        while limit and 1 <= (left := limit - max(self.lengths)) < max(map(len, fresh)):
            now = [tokens[: min(len(tokens) - left, left)] if len(tokens) > left else [] for tokens in fresh]
            self.feed(now)
            fresh = [tokens[len(own) :] for tokens, own in zip(fresh, now)]
        return fresh

    def _start(self, prompts: list[list[int]], proposal: Proposal) -> torch.Tensor:
        """As `score`, of prompts of which nothing is cached, or of the rest of one: a pass over them, whose states stay whatever is rejected and which sees
        what they show, and one over the candidates. States take padding before a text, which the model hides from them, and none behind it."""
        self.told = False
        sizes = ends = [len(tokens) for tokens in prompts]
        whole = [length + size for length, size in zip(self.lengths, sizes)]
        if self.states is not None and (min(sizes) < max(sizes) or any(self.padding)):
            prompts = [pads + own for pads, own in zip(self.padding, prompts)] if self.padding else prompts
            ends = [max(map(len, prompts))] * len(sizes)
            self.lengths, prompts = [size - end for size, end in zip(sizes, ends)], [[0] * (end - len(own)) + own for own, end in zip(prompts, ends)]
        logits = [self._forward(self._padded(prompts, 0), None, ends, torch.tensor(ends, device="cpu")[:, None] - 1)]
        self.lengths, self.fresh = [size - 1 for size in whole], [1] * len(sizes)
        if self.elsewhere is not None:
            self.elsewhere.begun = True
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
        if n < 2 or isinstance(self.run, Decoder) and (self.blind or self._compiled_places(n, self.lengths) is None):
            return None
        begin, sizes = perf_counter(), [min(max(own, 0), n) for own in k]
        self.cache.plan.lay(self.lengths, n, self.device, whole=True)
        coins = uniform[:, :n].flatten().view(-1, n)  # of one row, `contiguous` leaves the stride of all max(k), which a function is made for
        given = tokens.to(self.device), embeds, self.cache, layers_of(self.taps), vocab, drawing, coins.to(self.device)
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
        """Cache tokens (ragged, some rows may have none) without asking for logits. Where there are states, one pass up to the end of each row: what the
        others read in it that have ended before is taken back."""
        ends = [0, max(map(len, rows))] if self.states is None else [0, min(map(len, rows))] if self.traits.own_cache else sorted({0, *map(len, rows)})
        for begin, end in pairwise(ends):
            sizes = [len(tokens[begin:end]) for tokens in rows]
            tokens = self._padded([tokens[begin:end] for tokens in rows], 0)
            last = torch.full((len(rows), 1), tokens.shape[1] - 1, device="cpu")
            meant = [size or int(not length) for size, length in zip(sizes, self.lengths)]  # without one, the position of the last token: there may be no other
            self._forward(tokens, None, meant, last)
            self._keep([length + size for length, size in zip(self.lengths, sizes)], settled=False)

    def _padded(self, rows: list[list[int]], extra: int) -> torch.Tensor:
        width = max(map(len, rows)) + extra
        return upload([tokens + [0] * (width - len(tokens)) for tokens in rows], self.device)

    # --- rollback -----------------------------------------------------------------------------------------------------

    def commit(self, advance: list[int], tree: Tree | None = None, on_path: torch.Tensor | None = None) -> None:
        """Keep the first advance[b] nodes of the accepted path of row b (the root counts). What lies beyond is overwritten by
        the next block. A tree's path [B, N+1] is moved into place."""
        steps = max(advance)
        if tree is not None and not tree.is_chain and steps > 1:
            order = torch.where(on_path, torch.arange(on_path.shape[1], device=on_path.device), on_path.shape[1])
            nodes = order.sort(-1).values[:, 1:steps].clamp(max=len(tree))  # the root is in place
            starts = upload(self.lengths, nodes.device)[:, None]
            target, first = torch.arange(1, steps, device=nodes.device), 0
            if nodes.device.type == "cpu":  # elsewhere looking costs more than moving
                moved = (nodes != target).any(0).tolist()
                first = moved.index(True) if any(moved) else len(moved)
            source, target = (starts + at[..., first:] for at in (nodes, target))
            shown = [] if self.per_token is None else [self.per_token]
            for layer in [*filter(lambda layer: layer.is_initialized, self.cache.layers), *shown] if first < steps - 1 else ():
                layer.gather(source.to(self.device), target.to(self.device))
        self._keep([length + own - 1 + step for length, own, step in zip(self.lengths, self.fresh, advance)], settled=self.role == "target")

    def crop(self, lengths: list[int]) -> None:
        """Forget everything from position lengths[b] on in row b; all of it where that is below 0."""
        self._keep([max(min(own, new), 0) for own, new in zip(self.lengths, lengths)])

    def _keep(self, lengths: list[int], settled: bool = True) -> None:
        """What is cached of every row from now on; less where there are states, and none of just so many tokens. settled: as `Checkpoints.back_to` has it."""
        self.lengths = lengths if self.states is None else self.states.back_to(lengths, settled)

    def keep(self, rows: list[int]) -> None:
        """Only these rows go on."""
        if self.media is not None and not any(self.lengths) and rows != list(range(len(self.lengths))):  # what is shown is of all rows
            self.media, self.ahead, self.sight = None, [], {}
        self.lengths, self.ahead = [self.lengths[row] for row in rows], [self.ahead[row] for row in rows] if self.ahead else []
        self.cache.keep(upload(rows, self.device))
        if self.per_token is not None:
            self.per_token.keep(rows)
        self.sight = {name: value[upload(rows, value.device)] for name, value in self.sight.items()}
        if self.states is not None:
            self.states.keep(rows)
        if isinstance(self.run, Decoder):
            self.run.keep(rows)

    def load(self, cache: DynamicCache, columns: list[list[int]], cached: int) -> None:
        """Copy a caller's cache of `cached` columns; slot s of row b comes from column columns[b][s], the others are padding."""
        columns = [[column for column in row if column < cached] for row in columns]
        self.cache.load((read_cache if self.elsewhere is None else self.elsewhere.read)(cache), columns, self.device)
        self.lengths = [len(row) for row in columns]
        if self.states is not None:
            self.states.load(cache, self.lengths)

    def release(self) -> None:
        """Nothing is read from the cache any more."""
        self.cache.release()

    def row(self, b: int, tokens: Sequence[int] = (), last: bool = False) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is cached of row b, the committed `tokens`, as `SlotCache.row` has it: of all but the last of them, of which states may have to be told some."""
        if self.states is not None and self.lengths[b] < len(tokens) - 1:
            self.feed([[*tokens[self.lengths[b] : -1]]])
            self.calls -= 1  # housekeeping, not a verification
        return self.cache.row(b, self.lengths[b], last)
