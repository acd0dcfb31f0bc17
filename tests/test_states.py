"""Layers that carry states from token to token: what is kept of them, what is fed once more after a rejection, and what is refused."""

import random
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import CONFIG_MAPPING, DynamicCache

from hf_specdec.bench.meter import measured
from hf_specdec.cached_model import CachedModel
from hf_specdec.caches import CACHE, GOES_ON
from hf_specdec.drafts import CascadeDraft, EarlyExitDraft, ModelDraft, PromptLookupDraft, RecyclingDraft
from hf_specdec.drafts.feature import FeatureDraft
from hf_specdec.drafts.medusa import MedusaDraft
from hf_specdec.proposal import Proposal
from hf_specdec.states import Checkpoints
from hf_specdec.training import build_drafter
from tests.architectures import STATEFUL
from tests.conformance.builders import medusa_heads
from tests.helpers import ScriptedDraft, enabled, generated, padded, perturbed, plain, prompts, speculate, tiny_llama

pytestmark = pytest.mark.skipif(not GOES_ON, reason="this transformers does not go on from a state over several tokens")
HERE = {family.name for family in STATEFUL if family.kind in CONFIG_MAPPING}
KINDS = ["Qwen3.5 (text)", "Mamba 2", "Falcon-H1", "LFM2", "Kimi Linear", "Mamba", "Zamba", "Zaya", "RecurrentGemma"]  # delta rule beside attention, no attention, both in a layer,
KINDS = [kind for kind in KINDS if kind in HERE]  # convolutions alone, one step, token by token, head by head, states of another kind
every_kind = pytest.mark.parametrize("kind", KINDS)
CPU = torch.device("cpu")
RECURRENT, CONVOLUTIONS, UNKNOWN = "Qwen3.5 (text)", "LFM2", "Zaya"  # UNKNOWN: what makes its states of what a pass has read
IN_MODULES = "RecurrentGemma"  # whose plain generate begins a text of one token where the last call ended, and sorts no states with its beams, if it keeps any
needs_unknown = pytest.mark.skipif(UNKNOWN not in HERE, reason="this transformers has no Zaya")


def model_of(kind: str, seed: int = 0):
    model = next(family for family in STATEFUL if family.name == kind).model("eager", seed)
    model.generation_config.use_cache = kind != IN_MODULES
    return model


@pytest.mark.share(2)
@every_kind
@pytest.mark.parametrize("seed", range(4))
@torch.no_grad()
def test_whatever_is_drafted_kept_and_forgotten_the_logits_are_those_of_the_whole_text(kind, seed):
    """Odd orders of score, extend, crop and commit; every logit is compared with that of a pass without a cache."""
    model, rng = model_of(kind), random.Random(seed)
    cached, text = CachedModel(model, 200), prompts(7, seed=seed)[0]

    def whole(tokens):
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]

    for _ in range(14):
        drafted = [rng.randrange(1, 60) for _ in range(rng.choice([0, 0, 1, 3, 6]))]
        logits = cached.score([text], Proposal.from_lists([drafted], CPU))[0]
        torch.testing.assert_close(logits, whole(text + drafted)[len(text) - 1 :], atol=2e-3, rtol=0)
        kept = rng.randint(0, len(drafted))
        cached.commit([1 + kept])
        assert cached.lengths[0] <= len(text) + kept
        text += drafted[:kept]
        if rng.random() < 0.3:  # as a draft does: one token a time, some of which do not stand
            if cached.lengths[0] == len(text):
                for token in (5, 6, 7):
                    step = cached.extend(torch.tensor([[token]]), [1])
                torch.testing.assert_close(step[0, 0], whole([*text, 5, 6, 7])[-1], atol=2e-3, rtol=0)
                text += [5, 6, 7][: rng.randint(0, 3)]
            cached.crop([len(text) - rng.randint(0, 2)])
        text = [*text, rng.randrange(1, 60)]


@every_kind
def test_states_go_back_to_a_token_and_those_that_are_not_known_to_a_pass(kind):
    for kept, length in zip((0, 1, 2), [21, 21, 23] if kind == UNKNOWN else [21, 22, 23]):
        cached = CachedModel(model_of(kind), 64)
        with torch.no_grad():
            cached.score([prompts(21)[0]], Proposal.from_lists([[3, 4]], CPU))
        cached.commit([1 + kept])
        assert cached.lengths == [length]


@needs_unknown
def test_what_was_not_rejected_is_fed_once_more_and_never_more_than_the_limit_in_front_of_candidates():
    model, k = model_of(UNKNOWN), 4
    wrong = ScriptedDraft(lambda row: [1] * k)
    with measured(model) as cost:
        speculate(model, prompts(30), wrong, k=k, max_new_tokens=60)
    widths = cost.target.widths
    assert widths[:2] == [30, k], "the prompt has a pass of its own"
    assert max(widths[1:]) <= Checkpoints.PENDING + k and sum(width > k + 1 for width in widths) > 20


@every_kind
def test_nothing_is_read_twice(kind):
    if kind == UNKNOWN:
        pytest.skip("it is")
    model, k = model_of(kind), 4
    with measured(model) as cost:
        speculate(model, prompts(30), ScriptedDraft(lambda row: [1] * k), k=k, max_new_tokens=40)
    assert max(cost.target.widths[1:]) <= k + 1


@pytest.mark.share(4)
@every_kind
def test_plain_text_comes_out_with_k_auto_with_sampling_processors_and_with_stopping(kind):
    model = model_of(kind)
    for row in prompts(1, 3, 26):
        expected = plain(model, [row], max_new_tokens=30, repetition_penalty=1.3)
        out = speculate(model, [row], perturbed(model), k="auto", max_new_tokens=30, repetition_penalty=1.3)
        assert generated(out, [row]) == expected
        end = expected[0][9]
        stopped = speculate(model, [row], perturbed(model), k=5, max_new_tokens=30, repetition_penalty=1.3, eos_token_id=end)
        assert generated(stopped, [row])[0] == expected[0][: expected[0].index(end) + 1]


def test_one_drafts_for_a_target_without_states_and_the_other_way_round():
    llama, hybrid = tiny_llama(vocab_size=61), model_of(RECURRENT)
    for target, draft in ((llama, hybrid), (hybrid, llama), (hybrid, model_of("Falcon-H1")), (hybrid, model_of(CONVOLUTIONS, seed=1))):
        (row,) = prompts(12)
        assert generated(speculate(target, [row], draft, k=3, max_new_tokens=25), [row]) == plain(target, [row], max_new_tokens=25)


@pytest.mark.parametrize("kind", [RECURRENT, CONVOLUTIONS])
def test_a_draft_model_never_reads_its_text_again(kind):
    """Every one of its passes leaves states to go back to, whichever token is rejected."""
    model, rows = model_of(kind), prompts(30, seed=3)
    draft = perturbed(model, 0.02)
    for make in (ModelDraft, lambda draft: CascadeDraft(draft, PromptLookupDraft())):
        with measured(draft) as cost:
            out = speculate(model, rows, make(draft), k=5, max_new_tokens=40)
        widths = cost.target.widths
        assert generated(out, rows) == plain(model, rows, max_new_tokens=40) and 0.3 < out.speculation.acceptance_rate < 0.95
        assert widths[0] == 30 and max(widths[1:]) < 12, make


def test_drafts_that_read_the_prompts_logits_work():
    model, (row,) = model_of(RECURRENT), prompts(20)
    assert generated(speculate(model, [row], RecyclingDraft(), k=4, max_new_tokens=40), [row]) == plain(model, [row], max_new_tokens=40)


@pytest.mark.parametrize("layers", [[0], [1]], ids=["linear attention", "attention"])
def test_drafters_made_of_such_a_target_read_its_hidden_states(layers):
    model, (row,) = model_of(RECURRENT), prompts(11)
    drafter = build_drafter(model, layers, None, (0, 1, 2))
    expected = plain(model, [row], max_new_tokens=24)
    for draft in (FeatureDraft(drafter, model), MedusaDraft(medusa_heads(model), model), build_drafter(model, layers)):
        out = speculate(model, [row], draft, k=3, max_new_tokens=24)
        assert generated(out, [row]) == expected and out.speculation.proposed


@pytest.mark.parametrize("kind", ["Nemotron-H", "Zamba 2"])
def test_time_steps_are_limited_in_the_prompt_alone_as_plain_generate_does(kind):
    model, (row,) = model_of(kind), prompts(12)
    limits = [part.time_step_limit for part in model.modules() if hasattr(part, "time_step_limit")]
    assert limits[0][0] == 0.5
    expected = plain(model, [row], max_new_tokens=40)
    assert generated(speculate(model, [row], perturbed(model), k=4, max_new_tokens=40), [row]) == expected
    assert [part.time_step_limit for part in model.modules() if hasattr(part, "time_step_limit")] == limits

    def stop(module, args, output):
        if output.last_hidden_state.shape[1] < len(row):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.model.register_forward_hook(stop)
        speculate(model, [row], k=4, max_new_tokens=40)
    assert [part.time_step_limit for part in model.modules() if hasattr(part, "time_step_limit")] == limits


def test_two_threads_do_not_take_each_others_limits():
    model, rows = enabled(model_of("Nemotron-H")), prompts(12, 15, 9, 20)
    expected = [plain(model, [row], max_new_tokens=20) for row in rows]

    def run(row):
        ids = torch.tensor([row])
        return model.generate(ids, attention_mask=torch.ones_like(ids), speculative=True, num_assistant_tokens=3, max_new_tokens=20)[0, len(row) :].tolist()

    with ThreadPoolExecutor(4) as threads:
        assert [[text] for text in threads.map(run, rows)] == expected


# --- what is refused ------------------------------------------------------------------------------------------------------

def refused(words: str, run) -> None:
    with pytest.raises(ValueError, match=words):
        run()


def test_a_tree_and_early_exit_are_refused_by_name():
    model = model_of(RECURRENT)
    refused("carries a state.*trees", lambda: speculate(model, prompts(4), RecyclingDraft(branches=3), max_new_tokens=4))
    refused("carries states.*use another draft", lambda: EarlyExitDraft(model, 1))


def test_a_cache_of_several_rows_or_of_states_alone_is_refused():
    for kind, rows, words in ((RECURRENT, prompts(5, 5), "several rows of a model that carries states"), ("Mamba 2", prompts(5), "does not say how many tokens")):
        if kind in KINDS:
            model, inputs = model_of(kind), padded(rows)
            out = model.generate(**inputs, max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0)
            longer = {name: torch.nn.functional.pad(out.sequences, (0, 1), value=7) for name in ("input_ids",)}
            longer["attention_mask"] = torch.ones_like(longer["input_ids"])
            refused(f"{words}.*cannot be continued", lambda: enabled(model).generate(**longer, **{CACHE: out[CACHE]}, max_new_tokens=3, speculative=True))
    model, one = enabled(model_of(RECURRENT)), padded(prompts(5))
    cache = model.generate(**one, max_new_tokens=1, return_dict_in_generate=True)[CACHE]
    refused("several rows of a model that carries states", lambda: model.generate(**padded(prompts(6)), **{CACHE: cache}, do_sample=True, num_return_sequences=2, max_new_tokens=3, speculative=True))


def turn(model, text, cache, ours: bool, **options):
    """(text, cache) after one more call of generate over the whole text."""
    inputs = {"input_ids": torch.tensor([text]), "attention_mask": torch.ones((1, len(text)), dtype=torch.long), **({} if cache is None else {CACHE: cache})}
    more = dict(speculative=True, num_assistant_tokens=4, assistant_model=perturbed(model, 0.02), **options) if ours else {}
    out = model.generate(**inputs, max_new_tokens=9, min_new_tokens=9, return_dict_in_generate=True, **more)
    return out.sequences[0].tolist(), out[CACHE]


CONTINUED = [kind for kind in (RECURRENT, "Falcon-H1", CONVOLUTIONS, "Nemotron-H", "Granite 4 (hybrid)", "Inkling (text)", "Lara mini") if kind in HERE]  # Nemotron-H limits the time steps of prompts


@pytest.mark.share(2)
@pytest.mark.parametrize("ours", [(True, True, True), (False, True, True), (True, False, True), (True, True, False)], ids=str)
@pytest.mark.parametrize("kind", CONTINUED)
def test_a_conversation_goes_on_from_the_cache_of_the_turn_before(kind, ours):
    """Three turns, by plain generate and by ours; what is said between them has 1, 5 and 20 tokens."""
    model = enabled(model_of(kind))
    expected, text, cache, plain_cache = prompts(11)[0], prompts(11)[0], None, None
    for said, mine in zip((1, 5, 20), ours):
        expected, plain_cache = turn(model, expected, plain_cache, ours=False)
        text, cache = turn(model, text, cache, ours=mine)
        assert text == expected and type(cache) is type(plain_cache)
        text, expected = ([*own, *prompts(said, seed=9)[0]] for own in (text, expected))
    assert cache.get_seq_length() == plain_cache.get_seq_length() == len(text) - 20 - 1
    where = [[(layer.device, layer.dtype) for layer in one.layers if hasattr(layer, "conv_states")] for one in (cache, plain_cache)]
    assert where[0] == where[1] != []
    for own, plains in zip(cache.layers, plain_cache.layers):
        for name in ("conv_states", "recurrent_states"):
            for i, part in getattr(plains, name, {}).items():
                if part is not None:
                    torch.testing.assert_close(getattr(own, name)[i], part, atol=1e-4, rtol=1e-3)


@every_kind
def test_one_row_gets_its_cache_back_and_several_get_none(kind):
    if kind == IN_MODULES:
        pytest.skip("its cache holds no states")
    model = enabled(model_of(kind))
    for rows in (prompts(5), prompts(5, 5)):
        out = model.generate(**padded(rows), max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0)
        ours = model.generate(**padded(rows), max_new_tokens=3, return_dict_in_generate=True, pad_token_id=0, speculative=True)
        assert torch.equal(ours.sequences, out.sequences) and (type(ours.get(CACHE)) is type(out[CACHE]) if len(rows) == 1 else ours.get(CACHE) is None)


def test_a_drafter_cannot_be_made_of_layers_that_the_config_names_itself():
    refused("FalconH1Config says of itself", lambda: build_drafter(model_of("Falcon-H1"), [1]))


def test_nothing_is_left_behind():
    model = model_of(RECURRENT)
    (row,) = prompts(12)
    before = plain(model, [row], max_new_tokens=12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        speculate(model, [row], perturbed(model), k=3, max_new_tokens=12)
    assert plain(model, [row], max_new_tokens=12) == before


@torch.no_grad()
@pytest.mark.parametrize(("one", "other"), [("Falcon-H1", "Mamba 2"), ("Llama", "Falcon-H1"), ("Falcon-H1", "Llama"), ("LFM2", "Mamba 2")])
def test_a_cache_of_another_model_is_refused_by_its_layers(one, other):
    def model(name):
        family = next((family for family in STATEFUL if family.name == name), None)
        if family is None and name != "Llama":
            pytest.skip(f"{name} needs a newer transformers")
        return tiny_llama() if family is None else family.model("eager")

    source, target, ids = model(one), enabled(model(other)), torch.tensor(prompts(9))
    cache = DynamicCache(config=source.config)
    source(input_ids=ids[:, :5], use_cache=True, **{CACHE: cache})
    with pytest.raises(ValueError, match=f"{CACHE} holds the states of other layers than the target's.*leave it out"):
        target.generate(ids, max_new_tokens=4, speculative=True, **{CACHE: cache})
