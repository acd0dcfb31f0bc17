"""One call of `generate`: checks the arguments, makes the pieces, runs the loop, and packs what comes out."""

from __future__ import annotations

import warnings
from functools import partial
from math import ceil
from typing import Any

import torch
from transformers.generation import MaxLengthCriteria

from . import compat, joint, lengths, registry
from .arguments import check_call, check_draft_stop
from .caches import IN_MODULES, MADE, PADDING_READ, cached_tokens, counts_tokens, let_go, offloads, static_in, windows_of
from .cached_model import CachedModel
from .config import MAX_ASSISTANT_TOKENS
from .devices import seat_of
from .distributions import Sampler
from .draft_stop import StopRule
from .drafts.base import Context, Draft
from .drafts.vocabulary import check_vocabulary
from .elsewhere import elsewhere
from .following import settle, that_follow
from .guidance import Guided, guidance_of, without_guidance
from .kinds import STREAMS_FIRST
from .lockstep import agreement
from .loop import SpeculativeLoop
from .media import BY_COLUMNS, Embedded, Media, ahead, embedded
from .memory import check_logits
from .noise import Gumbel, Noise
from .outputs import SpeculativeOutput, SpeculativeSeq2SeqOutput, assemble_cache, stacked
from .per_token import PerToken, asked_for
from .probe import check_tokens, check_trees
from .schedule import AutoSchedule, FixedSchedule, HeuristicSchedule
from .seq2seq import Source
from .sequences import Sequences
from .trace import SpeculationTrace


class Call:
    """decoder: the `SpeculativeDecoder`, of which config, draft and streamer are read; the rest is what `generate` has prepared,
    inputs_tensor the input of an encoder-decoder's encoder."""

    def __init__(self, decoder, model, input_ids, processors, generation_config, inputs_tensor, model_kwargs):
        self.decoder, self.model, self.config = decoder, model, decoder.config
        let_go(compat.unwrap(model), model_kwargs.get(compat.CACHE))
        self.traits = compat.traits_of(compat.unwrap(model), "target")
        self.ids, embeds = input_ids, model_kwargs.get("inputs_embeds") if self.traits.encoder != "own" else None  # as they were passed; an encoder has read its own
        self.asked = generation_config  # whose lengths do not count embeddings
        if embeds is not None:
            input_ids, generation_config, model_kwargs = embedded(model, input_ids, generation_config, model_kwargs, self.traits)
        self.input_ids, self.generation, self.hidden = input_ids, generation_config, self.ids.shape != input_ids.shape
        check_vocabulary(decoder.draft, self.traits)
        check_draft_stop(decoder.draft, self.config)
        guiding, processors = without_guidance(processors)
        lengths.check_chunk(generation_config.prefill_chunk_size)
        shown = check_call(model, input_ids, processors, generation_config, model_kwargs, self.traits, self.config)
        self.source = Source.of(model, inputs_tensor, model_kwargs, len(input_ids), decoder.given) if self.traits.encoder == "own" else None
        self.read, self.streams_first = model_kwargs.get("encoder_outputs"), compat.unwrap(model).config.get_text_config().model_type in STREAMS_FIRST
        mask = model_kwargs.get(self.traits.mask_name)
        mask = torch.ones_like(input_ids) if mask is None else mask[:, -input_ids.shape[1]:]
        self.columns = [keep.nonzero()[:, 0].tolist() for keep in mask.bool()]  # of every row, what is not padding
        self.by_columns = compat.unwrap(model).config.model_type in BY_COLUMNS
        self.positions = torch.arange(mask.shape[1], device=mask.device)[None] if self.by_columns else model_kwargs.get("position_ids")
        self.media = Media(model, shown, input_ids, self.columns, self.positions, decoder.given) if shown is not None else None
        if embeds is not None:
            self.media = Embedded(model, {"inputs_embeds": embeds}, input_ids, self.columns, None)
        self.prompts = [row[columns].tolist() for row, columns in zip(input_ids, self.columns)]
        self.padding = [row[~keep].tolist() for row, keep in zip(input_ids, mask.bool())] if compat.unwrap(model).config.model_type in PADDING_READ else []
        if min(map(len, self.prompts)) == 0:
            raise ValueError(f"input_ids: a row of padding alone cannot be continued. Give every row at least one token, or {self.traits.mask_name} with a 1 where the token of "
                             f"padding is meant: without one, transformers takes it for padding.")
        if self.source is not None:
            check_tokens(compat.unwrap(model).get_decoder(), input_ids, self.prompts, "decoder_input_ids")
        elif self.media is None:  # what is shown may have marks of its own
            check_tokens(model, input_ids, self.prompts)
        if hasattr(decoder.streamer, "put") and len(self.prompts) > 1 and generation_config.num_beams in (None, 1):
            raise ValueError(f"streamer: a text streamer takes one row, this call has {len(self.prompts)}. Pass a callable "
                             f"streamer(row, tokens, drafted).")
        self.max_new = ceil(generation_config.max_length) - input_ids.shape[1]  # plain generate takes 12.5, too, and ends at 13
        self.guidance = guidance_of(guiding, model, self.prompts, self.traits, generation_config, self.media is not None, self.max_new)
        self.agree = agreement([model, *(run.model for run in decoder.draft.models())], generation_config.max_time)
        self.drawn: tuple[torch.Tensor, torch.Tensor] | None = None  # the state of torch's generator before and after the seed
        self.original_processors = processors
        seen = [[] for _ in self.prompts] if self.hidden else self.prompts
        self.processors = compat.processors_per_row(processors, self.ids, seen)
        self.cache = model_kwargs.get(compat.CACHE)
        defined = decoder.cache_is_given or getattr(self.cache, "_is_user_defined", False)
        self.given = self.cache is not None and (defined or cached_tokens(self.cache) > 0)
        alone = self.cache is not None and not counts_tokens(self.cache)  # no layer but those that carry states
        self.windows = None if alone else windows_of(self.cache, compat.unwrap(model).config.get_text_config(), self.media is not None)
        self.closed = self._why_no_cache()
        if self.closed:
            if self.given:
                held, text = type(self.cache).__name__, "decoder_input_ids for a text to be continued" if self.source else "the whole text as input_ids"
                raise ValueError(f"{compat.CACHE}: the {held} of {self.closed} cannot be continued with speculative=True. Leave it out, and pass {text}.")
            self.cache = None  # transformers' own, made for nothing
        self.made = model_kwargs.get(compat.CACHE)  # of an encoder-decoder, what it returns is of the kind that transformers has made

    def _why_no_cache(self) -> str:
        """Whose cache is neither taken nor handed back; "" where it is both."""
        if self.source is not None:
            return "an encoder-decoder model"
        if (own := self.traits.own_cache) and compat.unwrap(self.model).config.model_type in MADE:
            return "a model that makes its cache itself"
        if own and static_in(self.cache) is not None:
            return "a model whose cache is of its own kind"
        if compat.unwrap(self.model).config.model_type in IN_MODULES:
            return "a model that keeps its states in its modules"
        if self.traits.indexed or own and len(self.columns[0]) < self.input_ids.shape[1]:
            return "a padded row of a model whose cache is of its own kind" if own else "a model that keeps the keys of an indexer"
        if not self.traits.states or len(self.prompts) == 1 and not (self.given and 0 < cached_tokens(self.cache) and not counts_tokens(self.cache)):
            return ""
        return "several rows of a model that carries states" if len(self.prompts) > 1 else "a model of states alone, which does not say how many tokens it has seen,"

    def run(self, criteria: list) -> Any:
        generation, decoder, as_dict = self.generation, self.decoder, self.generation.return_dict_in_generate
        device, batch = compat.device_of(self.model), len(self.prompts)
        scores, logits = (bool(as_dict and wanted) for wanted in (generation.output_scores, generation.output_logits))
        rule = self._acceptance()
        self.max_new = _new_tokens(criteria, self.ids.shape[1], self.max_new)
        sequences = Sequences(self.prompts, self.max_new, criteria, device, decoder.streamer, self.hidden)
        self.processors = that_follow(self.processors, [[] for _ in self.prompts] if self.hidden else sequences.tokens)
        longest, limit = self._lengths()
        cached, asked = cached_tokens(self.cache) if self.given else 0, asked_for(generation)
        target = self._target(limit, False if asked else self.config.compile)
        anew = generation.use_cache is False or MADE.get(compat.unwrap(self.model).config.model_type) == ""
        target.per_token = PerToken.of(asked, target.cache.plan, batch, cached, self.windows, self.source and self.read, anew, self.streams_first)
        if cached:
            target.load(self.cache, self.columns, cached)
        if cached or self.by_columns:
            target.ahead = ahead(self.positions, self.columns, self.input_ids.shape[1])
        target.look(self.media, generation.prefill_chunk_size)
        target.padding = self.padding
        target.reader = decoder.draft.read if decoder.draft.reads_prompt else None
        seeds = self._seeds(batch)
        noise, gumbel = Noise(seeds, seat_of(device)), Gumbel(seeds, seat_of(device)) if rule.coupled else None
        hidden = list(map(len, self.prompts)) if self.hidden else ()
        sampler = Sampler(self.processors, rule.samples, scores, gumbel, sequences.eos, hidden, device)
        seat = noise.device if generation.do_sample else device  # of proposals, laws and verdicts
        context = Context(sequences.tokens, longest, self.traits.vocab_size, seat, sampler, noise.uniform, self.source, self._stop(),
                          target, self.config.seed is None, media=self.media, agree=self.agree)
        trace = SpeculationTrace(decoder.settings(self.rule_name), rule.lossless)
        loop = SpeculativeLoop(
            target, decoder.draft, rule, sampler, self._schedule(target), sequences, noise, context, trace,
            want_scores=scores, want_logits=logits,
            want_cache=bool(self.given or as_dict and generation.use_cache is not False and (self.source or not self.closed)),
        )
        self._run(loop, sequences)
        output = self._pack(loop, sequences)
        target.release()
        return output

    def _target(self, limit: int, compile: bool | str) -> CachedModel:
        place = elsewhere(self.made, self.model)
        if self.guidance is not None:
            return Guided(self.guidance, self.prompts, self.model, limit, "target", self.traits, compile, place)
        if (seat := joint.seat()) is not None:  # other threads' calls run, too
            free = self.config.num_assistant_tokens == "auto" and (self.config.seed is None or not self.generation.do_sample)
            return joint.Member(seat, self.decoder.draft, free, self.model, limit, "target", self.traits, self.source, compile, place)
        return CachedModel(self.model, limit, "target", self.traits, self.source, compile, place)

    @staticmethod
    def _own_in(made: Any) -> Any:
        """The cache for the decoder's own text in that of an encoder-decoder, where it is of a kind of its own."""
        return static_in(made) or (made.self_attention_cache if offloads(made) else None)

    def _lengths(self) -> tuple[int, int]:
        """Tokens of the longest text there can be, and slots for it with what is drafted beyond. ValueError for a target that cannot score that, and for
        logits that do not fit into memory."""
        draft, longest = self.decoder.draft, max(map(len, self.prompts)) + self.max_new
        name = "max_auto_tokens" if self.config.num_assistant_tokens == "auto" else "num_assistant_tokens"
        reach = getattr(self.config, name)
        check_trees(draft, self.model, self.traits, longest + reach, "target")
        nodes, size = draft.most_nodes(reach), 4 if self.generation.do_sample or self.guidance is not None else self.model.dtype.itemsize
        check_logits(len(self.prompts), nodes, self.traits.vocab_size, size, compat.device_of(self.model), name if nodes == reach else "tree")
        return longest, longest + reach

    def _run(self, loop: SpeculativeLoop, sequences: Sequences) -> None:
        streamer = self.decoder.streamer
        try:
            loop.run(self._begin) if self.max_new > 0 else self._begin()
        finally:
            if self.drawn:
                self._give_random_numbers_back()
            settle(self.processors, [row.tokens[row.prompt :] for row in sequences.rows])
        if hasattr(streamer, "end"):
            streamer.end()
        trace = loop.trace
        trace.target_calls, trace.draft_calls = loop.target.calls, loop.draft.calls
        trace.drafted = [row.drafted for row in sequences.rows]
        _warn_if_nothing_is_accepted(trace, loop.draft)

    def _begin(self) -> None:
        """From here on nothing is refused."""
        self.drawn = None
        self.decoder.began.set()
        if hasattr(self.decoder.streamer, "put"):
            self.decoder.streamer.put(self.ids.cpu())

    def _give_random_numbers_back(self) -> None:
        """To torch's generator, the one that a refused call has drawn, if no other thread has drawn since."""
        if torch.equal(self.drawn[1], torch.get_rng_state()):
            torch.set_rng_state(self.drawn[0])

    def _pack(self, loop: SpeculativeLoop, sequences: Sequences) -> Any:
        pad = self.generation._pad_token_tensor
        ids, prompt = sequences.padded(self.ids, 0 if pad is None else int(pad)), self.input_ids.shape[1]
        width = prompt + ids.shape[1] - self.ids.shape[1]
        cache = None
        if loop.want_cache and len(loop.cached_rows) == len(sequences.rows):
            rows = [loop.cached_rows[row.index] for row in sequences.rows]
            columns = [[*own, *range(prompt, width)] for own in self.columns]
            config = None if self.source else self.model.config
            write, into = partial(assemble_cache, config, rows, columns, width - 1), self._own_in(self.made) if self.source else self.cache
            cache = write(into) if loop.target.elsewhere is None else loop.target.elsewhere.hand_back(write, into, loop.target.lengths[0])
            if self.traits.states:
                loop.target.states.store(cache)
            cache = loop.target.run.with_cross(cache, self.made) if self.source else cache
        if not self.generation.return_dict_in_generate:
            return ids
        output = (SpeculativeSeq2SeqOutput if self.source else SpeculativeOutput)(
            sequences=ids,
            scores=stacked([row.scores for row in sequences.rows]) if loop.want_scores else None,
            logits=stacked([row.logits for row in sequences.rows]) if loop.want_logits else None,
            **{compat.CACHE: cache} | self._per_token(loop.target, sequences),
        )
        output.speculation = loop.trace
        return output

    def _per_token(self, target: CachedModel, sequences: Sequences) -> dict[str, tuple]:
        if target.per_token is None:
            return {}
        return target.per_token.packed(self.columns, self.input_ids.shape[1], [len(row.drafted) for row in sequences.rows])

    @property
    def rule_name(self) -> str:
        name = self.config.acceptance
        return ("speculative_sampling" if self.generation.do_sample else "greedy") if name == "auto" else name

    def _acceptance(self):
        rule = registry.load(registry.ACCEPTANCE, self.rule_name, "acceptance").from_config(self.config)
        if (rule.samples or rule.coupled) != bool(self.generation.do_sample):
            raise ValueError(f"acceptance={self.rule_name!r} does not go with do_sample={self.generation.do_sample}; use \"auto\", or do_sample={not self.generation.do_sample}.")
        return rule

    def _schedule(self, target: CachedModel, by_row: bool = True):
        """What decides on K for passes of `target`. by_row: whether it is asked for every row of the draft, and not for all beams as one."""
        k, stop, most = self.config.num_assistant_tokens, self.config.draft_stop, self.config.max_auto_tokens
        if stop == "heuristic":
            return HeuristicSchedule(5, most) if k == "auto" else HeuristicSchedule(k, MAX_ASSISTANT_TOKENS)
        if k != "auto" or stop != "constant":
            return FixedSchedule(most if k == "auto" else k)
        draft = self.decoder.draft
        timed = self.config.seed is None
        schedule = by_row and draft.schedule(most, timed) or AutoSchedule(most, self._relative_cost(), timed, draft.prior)
        if isinstance(schedule, AutoSchedule) and not schedule.drafting:  # a draft that costs something costs more with every token
            schedule.cost.blocks = target.blocks
        if isinstance(schedule, AutoSchedule) and timed:
            schedule.follow(compat.unwrap(self.model), (type(draft), type(target), len(self.prompts), by_row, target.blocks), [run.model for run in draft.models()])
        return schedule

    def _relative_cost(self) -> float | None:
        """Of a drafted token, where a round of the target's is one pass, or two of them."""
        cost = self.decoder.draft.relative_cost(self.model)
        return cost if self.guidance is None or cost is None else cost / 2

    def _stop(self) -> StopRule | None:
        kind = self.config.draft_stop
        if kind in ("constant", "heuristic"):
            return None
        return StopRule(kind, self.config.draft_confidence, self._relative_cost() or 0.0)

    def _seeds(self, batch: int) -> list[int]:
        seed = self.config.seed
        if isinstance(seed, tuple):
            if len(seed) != batch:
                raise ValueError(f"seed: {len(seed)} seeds for {batch} rows; give one per row, or a single int.")
            return list(seed)
        if seed is None and not self.generation.do_sample:
            seed = 0  # greedy decoding leaves torch's generator alone
        if seed is None:
            before = torch.get_rng_state()
            seed = self.agree(int(torch.randint(2**62, (), device="cpu")))
            self.drawn = before, torch.get_rng_state()
        return [(seed + row) % 2**63 for row in range(batch)]


def _new_tokens(criteria: list, prompt: int, most: int) -> int:
    """A caller's `MaxLengthCriteria` takes the place of the one that transformers makes."""
    lengths = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    return max(ceil(min(lengths)) - prompt, 1) if lengths and most > 0 else most


def _warn_if_nothing_is_accepted(trace: SpeculationTrace, draft: Draft) -> None:
    if draft.name == "model" and trace.proposed >= 100 and trace.acceptance_rate < 0.02:
        warnings.warn(f"assistant_model: {trace.accepted} of {trace.proposed} drafted tokens were accepted. Does the draft have the "
                      f"target's tokenizer?", stacklevel=4)
