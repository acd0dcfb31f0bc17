"""The model card of a drafter: what it is, what it was trained on, what it reached."""

from __future__ import annotations

from pathlib import Path

CARD = """---
library_name: hf_specdec
base_model: {target}
tags: [speculative-decoding, drafter]
---
# A draft for {target}

{warning}{what}. {shares} The head keeps {head} tokens, which carry {coverage:.2%} of the target's probability on the training text. Weights: {format}, {size:.1f} MB.

```python
import hf_specdec
{loading}
hf_specdec.enable(target).generate(**inputs, assistant_model=draft, speculative=True)
```

The draft decides how fast the target decodes, never what it says: every token is checked by the target.

| | |
| --- | --- |
| training text | {tokens:,} tokens with their prompts, held-out ones included; the answers are the target's own ({texts}) |{on_policy}
| loss, steps, tokens a step, learning rate | {loss}, {steps}, {batch_tokens}, {lr} |
| held out: the draft's likeliest token is the target's | {greedy:.3f} |
| held out: acceptance rate when sampling | {sampling:.3f} |{agreement}

Held-out text is of the same making, loops and all: on prompts of people the rates are lower. `benchmarks/drafts.py --drafters` measures
them.

It has the biases of the text that the target writes. It proposes nothing useful for another target.
"""


def write_card(folder: Path, trainer, data: dict) -> Path:
    """Write README.md into the drafter's folder."""
    last, config = trainer.progress.history[-1], trainer.config
    size = (folder / "model.safetensors").stat().st_size / 1e6
    text = CARD.format(
        warning=trainer.warning and f"{trainer.warning}\n",
        shares=trainer.shares, loading=trainer.loading.format(folder=folder),
        target=trainer.target_name or "the target", what=trainer.what,
        head=f"{len(trainer.ids):,}", coverage=trainer.coverage, format=config.format, size=size,
        tokens=data["tokens"], texts=", ".join(f"{count} {kind}" for kind, count in sorted(data["texts"].items())),
        loss=config.loss, steps=last["step"], batch_tokens=config.batch_tokens, lr=config.lr,
        on_policy=config.on_policy and f"\n| the draft's own text, judged by the target, in the second half | at least {config.on_policy:,} tokens |" or "",
        agreement="" if "target_agreement" not in last else
        f"\n| held out: the changed target's likeliest token is the given one's | {last['target_agreement']:.3f} |",
        greedy=last["greedy_acceptance"], sampling=last["sampling_acceptance"],
    )
    path = folder / "README.md"
    path.write_text(text, encoding="utf-8")
    return path
