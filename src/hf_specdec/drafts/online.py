"""Online distillation: a draft model that goes on learning from its rejections while it serves. OSD (Liu et al. 2023, arXiv 2310.07177)."""

from __future__ import annotations

import json
import os
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from ..hints import check_int
from ..proposal import Proposal, Verdict
from ..uploads import upload
from .base import Context
from .feature import FeatureDraft
from .features import inputs
from .inner import Composed
from .model import ModelDraft

FORMAT = "hf_specdec online 1"
BETAS, TINY = (0.9, 0.99), 1e-8
NEVER = -30.0  # log q of a token that the draft's head does not have


@dataclass
class Lesson:
    """What one row has taught: its tokens from position `start` on, the places (counted from there) after which a drafted token was rejected, the
    target's likeliest tokens there, int64 [m, T], with their probabilities, float32 [m, T]; for a feature drafter, its states [n, H]."""

    tokens: list[int]
    start: int
    places: list[int]
    ids: torch.Tensor
    probs: torch.Tensor
    states: torch.Tensor | None

    def cloned(self) -> Lesson:
        """Tensors made in inference mode cannot be learned from; their copies can."""
        return replace(self, ids=self.ids.clone(), probs=self.probs.clone(), states=None if self.states is None else self.states.clone())


class OnlineDraft(Composed):
    """`draft`, learning: where a round ends with a rejected token, the target's law there is kept, and every `every` rounds, before the next
    round drafts, the draft's model takes one step of Adam towards it (forward KL). Every proposal is reported with the law it was drawn from, so
    the output is the target's own whatever has been learnt; only the speed changes, from call to call and within one.

    draft:  a `ModelDraft` or `FeatureDraft`, or one of their trees. Of its model, the weights that `target` does not share are changed in place
            (a pruned head stays, too); three copies of them in float32 are kept.
    target: the model whose generate() it is used in.
    every:  rounds between steps, counted over calls. lr: the step size. rows: the latest rows that a step learns from. window: the last tokens
            of a row that a step reads. top: how many of the target's likeliest tokens are kept.

    A feature drafter learns to go on from the target's states, not from its own. Tokens that are kept wait in memory until the step;
    `save` writes weights and optimiser, no text. Raises ValueError for drafts without such a model, and for weights in an MX format.
    """

    name = "online"
    trusted = True

    def __init__(self, draft: ModelDraft, target: PreTrainedModel, every: int = 16, lr: float = 1e-4, rows: int = 8, window: int = 512, top: int = 64):
        if not isinstance(draft, ModelDraft) or draft.model is target or not draft.learns:
            raise ValueError(f"draft: {type(draft).__name__} has no model of its own that could learn; pass a ModelDraft or a FeatureDraft.")
        for name, value, most in (("every", every, 10**9), ("rows", rows, 1024), ("window", window, 2**20), ("top", top, 4096)):
            check_int(name, value, 1, most)
        if isinstance(lr, bool) or not isinstance(lr, (int, float)) or not 0 < lr < 1:
            raise ValueError(f"lr={lr!r} must be a number between 0 and 1.")
        super().__init__((draft,))
        self.draft, self.model, self.may_branch = draft, draft.model, draft.may_branch
        self.every, self.lr, self.window, self.top = every, lr, window, top
        self.own = _own(draft.model, target)
        self.moments = [(torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p, dtype=torch.float32), p.detach().float().clone())
                        for p in self.own.values()]
        self.steps = self.rounds = 0
        self.lessons: deque[Lesson] = deque(maxlen=rows)
        self.texts: list[list[int]] = []  # the rows of the call, live, also once all have ended
        self.pending: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = []

    # --- learning -----------------------------------------------------------------------------------------------------

    def commit(self, verdict: Verdict) -> None:
        super().commit(verdict)
        proposal, logits = self.judged, self.logits
        self.judged, self.logits, self.rounds = None, None, self.rounds + 1
        for b, path in enumerate(verdict.paths()):
            node = max(i for i, taken in enumerate(path) if taken)
            if node in proposal.tree.parents[: proposal.sizes[b]]:  # something was proposed there, and rejected
                law = logits[b, node].float().softmax(-1).topk(min(self.top, logits.shape[-1]))
                self.pending[b].append((len(self.texts[b]) - 1 + proposal.tree.depths[node], law.indices, law.values))

    def _gather(self, b: int) -> None:
        """What is pending of row b becomes a lesson."""
        row, feature = self.texts[b], isinstance(self.draft, FeatureDraft)
        kept = [item for item in self.pending[b] if feature <= item[0] < len(row)]
        self.pending[b] = []
        if not kept:
            return
        end = kept[-1][0] + 1
        start = max(end - self.window, int(feature))
        kept = [item for item in kept if item[0] >= start]
        states = self.draft.states[b, start - 1 : end - 1].clone() if feature else None
        self.lessons.append(Lesson(row[start:end], start, [place - start for place, _, _ in kept], torch.stack([ids for _, ids, _ in kept]),
                                   torch.stack([probs for _, _, probs in kept]), states))

    @torch.inference_mode(False)
    def learn(self) -> float | None:
        """One step on what has been kept, now; the mean loss, None if there was nothing to learn. Done every `every` rounds by itself."""
        for b in range(len(self.pending)):
            self._gather(b)
        lessons, self.rounds = list(self.lessons), 0
        if not lessons:
            return None
        flags = [(p, p.requires_grad) for p in self.model.parameters()]
        try:
            own = {id(p) for p in self.own.values()}
            for p, _ in flags:
                p.requires_grad_(id(p) in own)
            with torch.enable_grad():
                loss = self._loss([lesson.cloned() for lesson in lessons])
                grads = torch.autograd.grad(loss, list(self.own.values()), allow_unused=True)
        finally:
            for p, flag in flags:
                p.requires_grad_(flag)
        self._step(grads)
        self.lessons.clear()
        return float(loss.detach())

    def _loss(self, lessons: list[Lesson]) -> torch.Tensor:
        """- sum p log q, the mean over the places."""
        device, width = self.model.device, max(len(lesson.tokens) for lesson in lessons)
        tokens = upload([lesson.tokens + [0] * (width - len(lesson.tokens)) for lesson in lessons], device)
        tokens = tokens.clamp(max=self.draft.traits.vocab_size - 1)
        offset = int(isinstance(self.draft, FeatureDraft))  # its place t has the token at t + 1
        starts = upload([lesson.start - offset for lesson in lessons], device)
        given: dict[str, Any] = {"position_ids": starts[:, None] + torch.arange(width, device=device), "use_cache": False}
        if offset:
            states = torch.stack([torch.nn.functional.pad(lesson.states, (0, 0, 0, width - len(lesson.states))) for lesson in lessons])
            given["inputs_embeds"] = inputs(self.model, states.to(device), tokens)
        else:
            given["input_ids"] = tokens
        logits = self.model(**given).logits
        row = upload([b for b, lesson in enumerate(lessons) for _ in lesson.places], device)
        place = upload([place for lesson in lessons for place in lesson.places], device)
        ids, probs = (torch.cat([getattr(lesson, name) for lesson in lessons]).to(device) for name in ("ids", "probs"))
        log_q = logits[row, place].float().log_softmax(-1)
        known = ids < log_q.shape[-1]
        log_q = log_q.gather(-1, ids.clamp(max=log_q.shape[-1] - 1)).masked_fill(~known, NEVER)
        return -(probs * torch.where(log_q.isfinite(), log_q, NEVER)).sum(-1).mean()

    def _step(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Adam (Kingma and Ba 2015), with gradients of norm 1 at most; made beside the weights and then put in."""
        grads = [torch.zeros_like(w) if grad is None else grad.float() for grad, (_, _, w) in zip(grads, self.moments)]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        if not bool(norm.isfinite()):
            return
        scale, step, (a, b) = 1 / max(float(norm), 1.0), self.steps + 1, BETAS
        made = []
        for grad, (first, second, weight) in zip(grads, self.moments):
            first, second = torch.lerp(grad * scale, first, a), torch.lerp((grad * scale) ** 2, second, b)
            made.append((first, second, weight - self.lr * (first / (1 - a**step)) / ((second / (1 - b**step)).sqrt() + TINY)))
        self._put(step, made)

    def _put(self, steps: int, moments: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """New weights, all of them, also if Ctrl-C comes in between."""
        self.steps, self.moments = steps, moments
        try:
            self._copy()
        except BaseException:
            self._copy()
            raise

    @torch.no_grad()
    def _copy(self) -> None:
        for p, (_, _, weight) in zip(self.own.values(), self.moments):
            p.copy_(weight)

    # --- what stays ---------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write weights and optimiser to one safetensors file, complete or as it was before."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {f"{part}.{name}": tensor.contiguous() for name, moments in zip(self.own, self.moments)
                   for part, tensor in zip(("first", "second", "weight"), moments)}
        partial = path.with_name(path.name + ".partial")
        save_file(tensors, partial, metadata={"format": FORMAT, "steps": json.dumps(self.steps)})
        os.replace(partial, path)
        return path

    def restore(self, path: str | Path) -> None:
        """Go on from what `save` wrote of a draft of the same shape. ValueError naming the file, before anything is changed, if it is not that."""
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged or cut short ({error}); restore an earlier state.") from error
        shapes = {f"{part}.{name}": p.shape for name, p in self.own.items() for part in ("first", "second", "weight")}
        if about.get("format") != FORMAT or {name: tensor.shape for name, tensor in tensors.items()} != shapes:
            raise ValueError(f"{path} is not the state of an OnlineDraft with this draft's weights; restore it into the draft that it was saved from.")
        moments = [tuple(tensors[f"{part}.{name}"].to(p.device, torch.float32) for part in ("first", "second", "weight"))
                   for name, p in self.own.items()]
        self._put(int(json.loads(about["steps"])), moments)

    # --- the draft ----------------------------------------------------------------------------------------------------

    def start(self, context: Context) -> None:
        if context.source is not None:
            raise ValueError("assistant_model: online distillation is for decoder-only targets. Pass the draft itself with an encoder-decoder.")
        self.texts, self.pending = list(context.rows), [[] for _ in context.rows]
        self.draft.start(context)

    def propose(self, context: Context, k: list[int]) -> Proposal:
        if self.rounds >= self.every:
            self.learn()
        self.asked[0] = proposal = self.draft.propose(context, k)
        return proposal

    def observe(self, proposal: Proposal, logits: torch.Tensor) -> None:
        self.logits = logits
        super().observe(proposal, logits)

    def evidence(self, context: Context) -> list[int]:
        self.forget_asked()
        return self.draft.evidence(context)

    def keep(self, rows: list[int]) -> None:
        for b in set(range(len(self.pending))) - set(rows):
            self._gather(b)
        self.texts, self.pending = [self.texts[row] for row in rows], [self.pending[row] for row in rows]
        super().keep(rows)

    def rewind(self, context: Context, lengths: list[int]) -> None:
        self.pending = [[item for item in own if item[0] < length] for own, length in zip(self.pending, lengths)]
        self.draft.rewind(context, lengths)

    def finish(self) -> None:
        try:
            for b in range(len(self.pending)):
                self._gather(b)
        finally:
            self.texts, self.logits, self.pending = [], None, []
            super().finish()


def _own(model: PreTrainedModel, target: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """name -> weight of what may learn."""
    if any(hasattr(module, "weight_scale") for module in model.modules()):
        raise ValueError("draft: its weights are in an MX format, which cannot learn; pass a draft with dense weights (hf-specdec train --format bf16).")
    fixed = {id(p) for p in target.parameters()}
    head = model.get_output_embeddings()
    fixed |= {id(p) for p in head.parameters()} if hasattr(head, "ids") else set()
    own = {name: p for name, p in model.named_parameters() if id(p) not in fixed and p.is_floating_point()}
    if any(p.is_inference() for p in own.values()):
        raise ValueError("draft: its model was made under torch.inference_mode() and cannot learn; make it outside (generate() may be called inside).")
    if not own:
        raise ValueError("draft: all of its weights are the target's own; pass a draft that has some of its own.")
    return own
