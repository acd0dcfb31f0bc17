"""The training run: shards in, a drafter out; it can be stopped at any moment and goes on where it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import nn

from . import checkpoint, drafter, shared
from .batches import Batch, Corpus, Stream, frequent_tokens, split
from .interrupts import ctrl_c_waits
from .losses import LOSSES, acceptance, buckets
from .processes import join, need_accelerate
from .shards import Part, check_target, digest, probe, same, save_whole, shard_files


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    loss: a name in `losses.LOSSES`. steps, batch_tokens: optimiser steps, and tokens in each. lr: AdamW's, after `warmup` steps,
    falling to a tenth along a cosine. head: tokens that the draft's head keeps, None for all. layers: the target's layers that
    the draft starts from. format: of the stored weights. begin: a drafter with as many layers, from whose weights this one goes on: one that reads
    no hidden states, or, for a drafter that does, one that reads the same. on_policy: tokens that the draft, half trained, writes itself.
    """

    layers: tuple[int, ...] = (0, -1)
    head: int | None = 8192
    loss: str = "forward_kl"
    steps: int = 1000
    batch_tokens: int = 4096
    lr: float = 1e-3
    warmup: int = 30
    seed: int = 0
    format: str = "mxint8"
    precision: str = "bf16"
    begin: str = ""
    on_policy: int = 0

    @property
    def half(self) -> bool:
        """Whether models compute in bfloat16."""
        return self.precision == "bf16"

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise ValueError(f"loss={self.loss!r} is not known; choose one of {sorted(LOSSES)}.")
        if self.precision not in ("bf16", "float32"):
            raise ValueError(f"precision={self.precision!r} must be \"bf16\" or \"float32\".")
        for name in ("steps", "batch_tokens", "head"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} must be at least 1.")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr={self.lr!r} must be a finite learning rate above 0.")


def no_begin(config: RunConfig) -> None:
    """ValueError for a `begin` that the run has no use for."""
    if config.begin:
        raise ValueError(f"begin={config.begin!r}: only a draft with layers of its own goes on from another drafter; leave it out.")


@dataclass
class Progress:
    """Where a run is: step, and the history of held-out measurements."""

    step: int = 0
    history: list[dict] = field(default_factory=list)


class Student(nn.Module):
    """The draft as it is trained: the logits of its own head at some positions only."""

    def __init__(self, draft: nn.Module, half: bool):
        super().__init__()
        self.draft, self.half = draft, half

    def forward(self, tokens: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        """Logits [N, V'] at the places where [N] of tokens [B, L]. Padding is on the right: a causal draft does not see it."""
        head = self.draft.get_output_embeddings()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.half):
            hidden = self.draft.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            return getattr(head, "few", head)(hidden.flatten(0, 1)[where]).float()


class Trainer:
    """Trains a draft with layers of its own between the target's embedding and head.

    target: the model whose parts the draft shares, in float32 or, with precision "bf16", bfloat16. data: the folder of shards. out: where checkpoint and drafter go.

    Raises ValueError for a folder without shards, and where `out` holds files of others, or the checkpoint of a run with another config
    or other data; ImportError without accelerate.
    """

    reads: tuple[int, ...] = ()  # layers of the target whose hidden states the draft sees
    checkpoint = "checkpoint.safetensors"
    writes: tuple[str, ...] = ()  # beside what every run writes
    states: Path | None = None   # where those of the shards are
    of_the_target = True  # the draft is made of the target's parts
    first = 0             # token of a text that the draft can say something after
    # for the card: what it says first, what it says of the target's parts, and how the draft is loaded
    warning = ""
    shares = "Embedding and output head are the target's own and not stored."
    loading = 'from hf_specdec import training\n\ndraft = training.load_drafter("{folder}", target)'

    def __init__(self, target, data: str | Path, out: str | Path, config: RunConfig, target_name: str = ""):
        self.config, self.target, self.out, self.target_name = config, target, Path(out), target_name
        if self.of_the_target:
            drafter.check_dtype(target, config)
        layers = drafter.layer_numbers(config.layers, target) if self.of_the_target else []
        drafter.check_begin(config.begin)
        self.data = Path(data)
        self.refuse(self.out, self.data, config)
        join(target.device)
        self.accelerator = need_accelerate().Accelerator(cpu=target.device.type == "cpu")
        parts, held = split(self.data)
        check_target(self.data, target)
        self.shards = {path.name: digest(path) for path in shard_files(self.data)}
        self.probe = probe(target.get_input_embeddings().weight)
        vocab = target.config.get_text_config().vocab_size
        self.corpus, self.held = (Corpus(texts, vocab, config.batch_tokens, config.seed, states=self.states, first=self.first) for texts in (parts, held))
        ids, self.coverage = (torch.arange(vocab), 1.0) if config.head is None else frequent_tokens(parts, vocab, config.head)
        self.ids = ids.to(target.device)
        self.place = torch.full((vocab,), -1).index_put((ids,), torch.arange(len(ids))).to(target.device)
        self.draft = self._build(layers, None if config.head is None else ids)
        own = self._own()
        for p in own:  # what learns does so in float32, whatever the target is in
            p.data = p.data.float()
        for p in self.draft.parameters():
            p.requires_grad_(any(p is mine for mine in own))
        optimizer = torch.optim.AdamW(self._groups(own), lr=config.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.student, self.optimizer = self.accelerator.prepare(self._student(), optimizer)
        self.own, self.progress = own, Progress()
        self.streams = [Stream(self.corpus)]
        self._resume()

    @classmethod
    def refuse(cls, out: Path, data: Path, config: RunConfig) -> dict | None:
        """What the checkpoint in `out` says, if there is one. ValueError for a folder that the run cannot write to or go on from."""
        own = out / cls.checkpoint
        checkpoint.refuse_foreign(out, (*checkpoint.DRAFTER, *cls.writes), (own, out / "drafter.json"))
        return checkpoint.check(own, config, data)

    def _build(self, layers: list[int], ids: torch.Tensor | None) -> nn.Module:
        draft = drafter.build(self.target, layers, ids, self.reads)
        return drafter.begin(draft, drafter.load(self.config.begin, self.target)) if self.config.begin else draft

    def _own(self) -> list[nn.Parameter]:
        return shared.own_parameters(self.draft)

    def _groups(self, own: list[nn.Parameter]) -> list:
        """The optimiser's groups; one may have a `scale` of its learning rate."""
        return own

    def _save(self, notes: dict) -> Path:
        return drafter.save(self.draft, self.out, self.target_name, self.config.format, notes)

    @property
    def what(self) -> str:
        """The draft in words, for its card."""
        return f"{len(self.config.layers)} layer(s) that started as layers {', '.join(map(str, self.config.layers))} of the target"

    # --- the run ------------------------------------------------------------------------------------------------------

    def use(self, files: list[Path]) -> None:
        """Every other step from now on is on these shards."""
        self.streams.append(Stream(Corpus([Part(path) for path in files], len(self.place), self.config.batch_tokens, self.config.seed)))

    def run(self, report: Callable[[Progress, float], None] | None = None, every: int = 50, until: int | None = None) -> None:
        """Train up to the step `until` (the last one without it); measure and keep a checkpoint every `every` steps, and before
        Ctrl-C is passed on."""
        last, loss = self.config.steps if until is None else min(until, self.config.steps), None
        try:
            while self.progress.step < last:
                with ctrl_c_waits():
                    loss = self.step()
                if self.progress.step % every == 0 or self.progress.step == last:
                    self._look(loss)
                if report:
                    report(self.progress, loss)
            if last == self.config.steps and [entry["step"] for entry in self.progress.history[-1:]] != [self.progress.step]:
                self._look(loss)  # it was stopped between the last step and its measurement
        except KeyboardInterrupt:
            self.keep()
            raise

    def _look(self, loss: float | None) -> None:
        held = self.measure()
        self._finite(held["sampling_acceptance"])
        self.progress.history.append({"step": self.progress.step, "train_loss": loss, **held})
        self.keep()

    def step(self) -> float:
        """One optimiser step; the mean loss of its positions."""
        batch = self._batch()
        self.draft.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * self._rate() * group.get("scale", 1.0)
        loss = self._loss(batch)
        value = float(loss.detach())
        self._finite(value)
        self.accelerator.backward(loss)
        self.accelerator.clip_grad_norm_(self.own, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        return value

    def _finite(self, value: float) -> None:
        """A draft of infinite weights is neither kept nor finished."""
        if not math.isfinite(value):
            raise ValueError(f"lr={self.config.lr!r}: the run has diverged, its loss or acceptance at step {self.progress.step} is {value}. Take a smaller "
                             f"learning rate, and another folder (or delete the checkpoint in {self.out}, if there is one).")

    def _rate(self) -> float:
        """A rising line, then half a cosine down to a tenth."""
        step, config = self.progress.step, self.config
        if step < config.warmup:
            return (step + 1) / config.warmup
        done = min((step - config.warmup) / max(config.steps - config.warmup, 1), 1.0)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    def _batch(self) -> Batch:
        step = self.progress.step
        stream = self.streams[step % len(self.streams)]
        number = step // len(self.streams) * self.accelerator.num_processes + self.accelerator.process_index
        return stream.batch(number).to(self.ids.device)

    def _student(self) -> nn.Module:
        return Student(self.draft, self.config.half)

    def _logits(self, batch: Batch) -> list[torch.Tensor]:
        """[N, V'] for every step that the draft takes on its own; here one."""
        return [self.student(batch.tokens, batch.where)]

    def _loss(self, batch: Batch) -> torch.Tensor:
        return LOSSES[self.config.loss](*self._laws(batch, self._logits(batch)[0])).mean()

    def _laws(self, batch: Batch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return buckets(logits, batch.ids, batch.logprobs, self.place)

    def held_out(self, batches: int) -> Iterator[tuple[Batch, torch.Tensor]]:
        """The first batches of held-out text, each with the target's likeliest next tokens there, int64 [N]."""
        for texts in self.held.order(0)[:batches]:
            batch = self.held.batch(texts).to(self.ids.device)
            yield batch, batch.ids.gather(1, batch.logprobs.argmax(-1, keepdim=True)).squeeze(1)

    @torch.no_grad()
    def measure(self, batches: int = 12) -> dict:
        """On held-out text: how often the draft's likeliest token is the target's, and the acceptance rate when sampling; by step,
        where the draft takes more than one."""
        self.draft.eval()
        hits, rates, n = [], [], 0
        for batch, best in self.held_out(batches):
            steps = self._logits(batch)
            hits.append(torch.tensor([float((self.ids[logits.argmax(-1)] == best).sum()) for logits in steps]))
            rates.append(torch.tensor([float(acceptance(*self._laws(batch, logits)).sum()) for logits in steps]))
            n += len(best)
        greedy, sampling = ((torch.stack(part).sum(0) / n).tolist() for part in (hits, rates))
        return {"greedy_acceptance": greedy[0], "sampling_acceptance": sampling[0], **({"greedy_by_step": greedy} if len(greedy) > 1 else {})}

    # --- what stays ---------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """The checkpoint, complete or as it was before."""
        if not self.accelerator.is_main_process:
            return
        self.out.mkdir(parents=True, exist_ok=True)
        tensors = {f"weight.{i}": p.detach() for i, p in enumerate(self.own)}
        for i, p in enumerate(self.own):
            tensors |= {f"{name}.{i}": value for name, value in self.optimizer.state.get(p, {}).items()}
        about = {"config": asdict(self.config), "progress": asdict(self.progress), "target": self.probe, "data": self.shards}
        save_whole({name: tensor.contiguous() for name, tensor in tensors.items()}, self.out / self.checkpoint,
                   {name: json.dumps(value) for name, value in about.items()})

    def _resume(self) -> None:
        if (about := self.refuse(self.out, self.data, self.config)) is None:
            return
        if "target" in about and not same(about["target"], self.probe):
            raise ValueError(f"out: {self.out} holds a run of another target; name another folder.")
        tensors = checkpoint.tensors(self.out / self.checkpoint, {f"weight.{i}": p for i, p in enumerate(self.own)})
        for i, p in enumerate(self.own):
            p.data.copy_(tensors[f"weight.{i}"])
            self.optimizer.state[p] = {name: tensors[f"{name}.{i}"].to(p.device if name != "step" else "cpu")
                                       for name in ("step", "exp_avg", "exp_avg_sq") if f"{name}.{i}" in tensors}
        self.progress = Progress(**about["progress"])

    def finish(self) -> Path:
        """Write the drafter, with what the run was and reached."""
        notes = {"run": asdict(self.config), "head_coverage": self.coverage, "trained_tokens": self.corpus.tokens,
                 "held_out_tokens": self.held.tokens, **(self.progress.history or [{}])[-1]}
        if self.accelerator.is_main_process:
            self._save(notes)
        self.accelerator.wait_for_everyone()
        return self.out
