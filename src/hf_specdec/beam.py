"""Speculative beam search: the target's beams, scored several steps ahead (Leviathan et al. 2023, A.4).

The search itself is transformers' own, step for step: processors, scores, length penalty, early stopping. What it asks for at a step,
the logits after every running beam, is answered here. One target pass scores every beam and what the draft thinks will follow it; as
long as all beams of a step are among what was scored, the step costs no pass. The first step with a beam that nobody guessed ends
the round, so the result is that of plain beam search, whatever the draft. Where it samples (do_sample=True), transformers draws from the same laws
with the same calls of torch's generator, of which a draft takes nothing: the same seed gives the beams of plain generate.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateBeamEncoderDecoderOutput

from . import compat
from .beam_states import BeamStates
from .cached_model import CachedModel
from .caches import IN_MODULES
from .call import Call
from .lockstep import alone
from .outputs import WithTrace
from .per_token import asked_for
from .distributions import Sampler
from .drafts.base import Context, Draft
from .probe import check_batch
from .proposal import Proposal, Verdict
from .trace import Round, SpeculationTrace
from .uploads import upload

AFRESH = ("ngram", "prompt_lookup", "suffix_automaton")  # drafts that read all they need from the rows
KEPT = ("model", "model_tree", "recycling")  # drafts whose `keep` may repeat rows


class SpeculativeBeamOutput(WithTrace, GenerateBeamDecoderOnlyOutput):
    """`GenerateBeamDecoderOnlyOutput` with `speculation`, the `SpeculationTrace` of the call."""


class SpeculativeSeq2SeqBeamOutput(WithTrace, GenerateBeamEncoderDecoderOutput):
    """`GenerateBeamEncoderDecoderOutput` with `speculation`, the `SpeculationTrace` of the call."""


class ScoredBeams:
    """Answers for the logits after beams, out of as few target passes as the draft allows.

    A beam is the number of the prompt whose source or images it reads (0 where nothing but its text is read), and its tokens. A row is a distinct beam of
    some prompt. rows: those of the last pass; places: what it has scored, beam -> (row, node). shown: hidden states and attentions of the last step, by name. alike: whether the first pass has a row for each of the beams
    of a prompt although they are still alike, as what transformers has prepared for it has.
    """

    def __init__(self, target: CachedModel, draft: Draft, schedule, context: Context, trace: SpeculationTrace, alike: bool = False):
        self.target, self.draft, self.schedule, self.context, self.trace, self.alike = target, draft, schedule, context, trace, alike
        self.places: dict[tuple[int, ...], tuple[int, int]] = {}
        self.shown: dict[str, tuple | None] = {}
        self.proposal: Proposal | None = None
        self.steps, self.k, self.begin = 0, 0, perf_counter()

    def __call__(self, beams: list[tuple[int, ...]]) -> torch.Tensor:
        """Logits [R, V] after every beam; all are one token longer than the last time."""
        if any(beam not in self.places for beam in beams):
            self._end_round()
            self._pass(list(beams if self.alike and self.proposal is None else dict.fromkeys(beams)))
        self.steps += 1
        if self.target.per_token is not None:
            self.shown = self.target.per_token.step([self.places[beam] for beam in beams], self.proposal.tree, list(map(len, self.context.rows)))
        rows, nodes = upload([self.places[beam] for beam in beams], self.logits.device).unbind(-1)
        return self.logits[rows, nodes]

    def _pass(self, beams: list[tuple[int, ...]]) -> None:
        """One target pass over `beams` and the candidates of the draft."""
        begin = perf_counter()
        self._follow(beams)
        if self.target.per_token is not None:
            self.target.per_token.begin()
        left = self.target.room(self.context.rows, [self.context.max_length - len(row) for row in self.context.rows])
        evidence = self.draft.evidence(self.context)
        self.k = self.schedule.next_k([max(evidence)], [min(left)])[0]
        k = self.target.together(self.context.rows, [self.k if own >= 0 else 0 for own in evidence])
        proposal = self.draft.propose(self.context, k)
        proposal = self.context.counted(proposal.within([own - 1 for own in left]))
        drafted = perf_counter()
        self.logits, self.proposal = self.target.score(self.context.rows, proposal).to(self.context.device), proposal
        self.draft.observe(proposal, self.logits)
        self.places = _places(beams, proposal)
        self.spent = drafted - begin, perf_counter() - drafted

    def _follow(self, beams: list[tuple[int, ...]]) -> None:
        """The caches of target and draft go to the rows and paths that the beams have come from."""
        before = self.proposal
        if before is not None:
            sources, nodes = zip(*(self.places[beam[:-1]] for beam in beams))
            on_path = before.tree.ancestors[list(nodes)].to(self.context.device)
            advance = [before.tree.depths[node] + 1 for node in nodes]
            self.target.fresh = [self.target.fresh[row] for row in sources]
            if list(sources) != list(range(len(self.context.rows))):
                self.target.keep(list(sources))
                if self.draft.name in KEPT:
                    self.draft.keep(list(sources))
            self.target.commit(advance, before.tree, on_path)
            if self.draft.name in KEPT:
                self.draft.commit(Verdict(on_path, upload([beam[-1] for beam in beams], self.context.device)))
        self.context.rows[:] = [list(beam[1:]) for beam in beams]
        if before is None or self.draft.name in AFRESH:
            self.draft.start(self.context)

    def _end_round(self) -> None:
        """Note what the pass before has brought: beam steps, all but one of them for nothing."""
        if self.proposal is None:
            return
        seconds = self.context.agree(perf_counter() - self.begin)
        self.schedule.observe([self.k], [max(self.steps - 1, 0)], seconds if self.trace.rounds else None)
        self.trace.rounds.append([Round(0, sum(self.proposal.sizes), self.steps - 1, self.steps, self.draft.name)])
        self.trace.clock(*self.spent, seconds - sum(self.spent), self.target.seconds + self.draft.forward_seconds)
        self.steps, self.begin = 0, perf_counter()

    def finish(self) -> None:
        self._end_round()
        self.trace.target_calls, self.trace.draft_calls = self.target.calls, self.draft.calls


def _places(beams: list[tuple[int, ...]], proposal: Proposal) -> dict[tuple[int, ...], tuple[int, int]]:
    """Every beam and every candidate behind one: its tokens -> (row, node)."""
    places = {}
    for row, (beam, tokens, size) in enumerate(zip(beams, proposal.tokens.tolist(), proposal.sizes)):
        texts = [beam]
        for parent, token in zip(proposal.tree.parents[:size], tokens):
            texts.append((*texts[parent], token))
        for node, text in enumerate(texts):
            places.setdefault(text, (row, node))
    return places


class BeamCall(Call):
    """One call of `generate` with num_beams > 1."""

    def run(self, criteria: list) -> Any:
        generation, draft = self.generation, self.decoder.draft
        self._check(draft)
        prompt, read = self.ids.shape[1], self.source is not None or self.media is not None
        longest, limit = self._lengths()
        if self.source is not None:
            self.source.keep(list(range(0, len(self.input_ids), generation.num_beams)))  # transformers has repeated it for every beam
        target = self._target(limit, compile=False)
        target.look(self.media)
        target.padding = [*dict(zip(map(tuple, self.prompts), self.padding)).values()]  # of the first pass, which has a row for each
        if asked := asked_for(generation):
            target.per_token = BeamStates(asked, target.cache.plan, self.columns, self.input_ids.shape[1], self.max_new, self.windows, "" if self.source is None else "decoder_", self.streams_first)
        context = Context([], longest, self.traits.vocab_size, compat.device_of(self.model), Sampler.greedy(), _no_noise, self.source, self._stop(), target,
                          media=self.media, agree=self.agree)
        trace = SpeculationTrace(self.decoder.settings(self.rule_name))
        scored = ScoredBeams(target, draft, self._schedule(target, by_row=False), context, trace, self.media is not None)

        def logits(sequences: torch.Tensor) -> torch.Tensor:
            texts = [(*own, *new) for own, new in zip(self.prompts, sequences[:, prompt:].tolist())]
            return scored([(i // generation.num_beams if read else 0, *text) for i, text in enumerate(texts)])

        with draft.in_use():
            self.decoder.began.set()
            output = compat.beam_search(self.model, logits, self.ids, self.original_processors, criteria, self.asked, lambda: scored.shown, self.read)
            scored.finish()
        if not generation.return_dict_in_generate:
            return output
        output = (SpeculativeBeamOutput if self.source is None else SpeculativeSeq2SeqBeamOutput)(**output)
        output.speculation = trace
        return output

    def _check(self, draft: Draft) -> None:
        """Refuse by name what beam search cannot be, before any work."""
        beams, sampled = f"num_beams={self.generation.num_beams}", self.generation.do_sample
        if sampled and self.config.seed is not None:
            raise ValueError(f"seed={self.config.seed!r} with {beams} and do_sample=True: beams of a prompt are drawn together, from torch's generator. Leave seed out and call "
                             f"torch.manual_seed before, as for plain generate(), or use num_beams=1.")
        if sampled and self.agree is not alone:
            raise ValueError(f"{beams} with do_sample=True: the processes that run this model together would each draw other beams. Use do_sample=False, or num_beams=1.")
        if self.decoder.streamer is not None:
            raise ValueError(f"{beams}: beams cannot be streamed, which of them wins is known at the end. Drop streamer, or use num_beams=1.")
        if compat.unwrap(self.model).config.model_type in IN_MODULES and self.generation.use_cache is not False:
            raise ValueError(f"{beams}: plain generate() keeps the states of {type(compat.unwrap(self.model)).__name__} in its modules, where they do not follow the beams, so that "
                             f"it finds others than without a cache. Pass use_cache=False, whose beams these are, or use num_beams=1.")
        if self.given:
            raise ValueError(f"{beams}: {compat.CACHE} cannot be given to a speculative beam search. Leave it out, or use speculative=False.")
        if draft.name not in (*AFRESH, *KEPT):
            raise ValueError(f"{beams}: the draft {draft.name!r} does not follow beams that branch; those that do are {sorted((*AFRESH, *KEPT))}. Pass one of "
                             f"them, or use num_beams=1.")
        if self.config.lenience != 1.0 or self.config.acceptance not in ("auto", "speculative_sampling" if sampled else "greedy"):
            raise ValueError(f"{beams}: beam search is exact, it takes lenience=1.0 and acceptance=\"auto\" (here {self.config.lenience} and "
                             f"{self.config.acceptance!r}). Drop them, or use num_beams=1.")
        for option in ("compile", "record_probs"):
            if getattr(self.config, option):
                raise ValueError(f"{beams}: {option}=True is not there for beam search. Drop it, or use num_beams=1.")
        if hasattr(draft, "traits"):
            check_batch(compat.unwrap(draft.model), draft.traits, len(self.prompts), "assistant_model")


def _no_noise(stream: str, n: int) -> torch.Tensor:
    raise ValueError("what is drafted for beams is not drawn; this draft draws.")
