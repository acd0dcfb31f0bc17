"""Calls of several threads that share passes: each text is the one that its call would have got alone."""

import threading
import time
from contextlib import contextmanager

import pytest
import torch

import hf_specdec
from hf_specdec import joint as joint_module
from hf_specdec.cached_model import CachedModel
from hf_specdec.drafts import EarlyExitDraft, MixtureDraft, ModelDraft, NGramRecyclingDraft, RecyclingDraft, SuffixAutomatonDraft
from hf_specdec.joint import Joint, Member
from hf_specdec.kv_cache import SlotLayer

from .architectures import FAMILIES, reference
from .bench.conftest import tiny_model
from .conformance.builders import VARIANTS
from .helpers import perturbed, tiny_llama

LENGTHS, NEW = (9, 40, 3, 17), (48, 12, 30, 60)


def prompts(count: int = 4, repeats: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    found = [torch.randint(5, 120, (1, n), generator=generator) for n in LENGTHS[:count]]
    return [torch.cat([ids, ids[:, :3]], 1) for ids in found] if repeats else found


def call(model, ids, new: int, **more):
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, eos_token_id=None, **{"do_sample": False} | more)


def together(jobs, joint: Joint | None = None) -> list:
    """What each job returns. All but the last begin at once; that one when the others have waited for each other six times."""
    joint, found = joint or Joint(), [None] * len(jobs)
    arrive, arrivals = joint.arrive, iter(range(10**9))

    def run(place: int) -> None:
        try:
            with joint.taking_part():
                found[place] = jobs[place]()
        except Exception as error:
            found[place] = error

    def begin(some) -> None:
        """By one that holds the monitor, so that none of them is through before the others have come."""
        before = joint.coming
        for thread in some:
            thread.start()
        while joint.coming < before + len(some):
            time.sleep(0.001)

    def noted(seat) -> None:
        if next(arrivals) == 5:
            begin(threads[1:][-1:])
        arrive(seat)

    joint.arrive, threads = noted, [threading.Thread(target=run, args=(place,)) for place in range(len(jobs))]
    with joint.monitor:
        begin(threads[:-1] or threads)
    for thread in threads:
        while thread.ident is None:
            time.sleep(0.001)
        thread.join(60)
    joint.arrive = arrive
    assert not joint.seats and not joint.rows and joint.shared is None
    return found


@contextmanager
def passes(model):
    """The rows of every pass, as they come."""
    rows = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    yield rows
    handle.remove()


def drafts(model) -> dict:
    return {"lookup": lambda: None, "automaton": SuffixAutomatonDraft, "a model": lambda small=perturbed(tiny_model(0)): small, "a tree": MixtureDraft,
            "the target's cache": lambda: EarlyExitDraft(model, 1)}


@pytest.mark.parametrize("kind", ["lookup", "automaton", "a model", "a tree", "the target's cache"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_every_text_is_that_of_its_call_alone(kind, sampled):
    model = hf_specdec.enable(tiny_model(0))
    make, said = drafts(model)[kind], {"do_sample": True, "temperature": 2.0} if sampled else {}

    def job(ids, new: int, seed: int):
        return lambda: call(model, ids, new, speculative={"num_assistant_tokens": 3, "seed": seed}, return_dict_in_generate=True, assistant_model=make(), **said)

    jobs = [job(ids, new, seed) for seed, (ids, new) in enumerate(zip(prompts(), NEW))]
    alone = [each().sequences for each in jobs] if sampled else [call(model, ids, new) for ids, new in zip(prompts(), NEW)]
    with passes(model) as rows:
        found = together(jobs)
    assert all(torch.equal(own.sequences, wanted) for own, wanted in zip(found, alone)), found
    assert max(rows) > 1 or kind in ("a tree", "the target's cache")
    cache = found[1].past_key_values if "past_key_values" in found[1] else found[1].cache  # what is handed back goes on
    longer = torch.cat([found[1].sequences, torch.tensor([[7, 8]])], 1)
    assert torch.equal(call(model, longer, 8, speculative=True, past_key_values=cache), call(model, longer, 8))


BRANCHING = {"a mixture": MixtureDraft, "n-grams": NGramRecyclingDraft, "tokens": lambda: RecyclingDraft(branches=4), "an automaton": lambda: SuffixAutomatonDraft(branches=3),
             "one of several": lambda: MixtureDraft(mode="choose"), "with a model": lambda: MixtureDraft(["suffix_automaton", "ngram_recycling", ModelDraft(perturbed(tiny_model(0)))])}


@pytest.mark.parametrize("kind", BRANCHING)
@pytest.mark.parametrize("said", [{}, {"do_sample": True, "top_k": 1}], ids=["greedy", "sampled"])
def test_drafts_that_branch_propose_chains_where_k_is_free_and_share_passes(kind, said, monkeypatch):
    model, shapes, score = hf_specdec.enable(tiny_model(0)), [], Member.score

    def noted(self, rows, proposal=None):
        shapes.append((self.joined, max(proposal.sizes), proposal.tree.is_chain))
        return score(self, rows, proposal)

    monkeypatch.setattr(Member, "score", noted)
    jobs = [lambda ids=ids, new=new: call(model, ids, new, speculative=True, return_dict_in_generate=True, assistant_model=BRANCHING[kind](), **said) for ids, new in zip(prompts(), NEW)]
    found = together(jobs)
    assert all(torch.equal(own.sequences, call(model, ids, new)) for own, ids, new in zip(found, prompts(), NEW))
    assert all(chain for joined, _, chain in shapes if joined) and any(drafted for joined, drafted, _ in shapes if joined)


IN_TURNS = ("cascade, over a tree that is drawn", "lookahead", "online", "online, a feature tree", "pass", "pass, tree", "shared_kv", "tree", "tree, with replacement", "tree, point masses",
            "tree, wide")


@pytest.mark.parametrize("name", sorted(VARIANTS))
@pytest.mark.parametrize("k", ["auto", 3])
def test_every_draft_gives_every_call_its_own_text_and_shares_passes_if_it_leaves_the_cache_alone(name, k, monkeypatch):
    target, joined = hf_specdec.enable(tiny_llama()), []
    texts = [(ids % target.config.vocab_size, new) for ids, new in zip(prompts(3), (48, 24, 30))]
    score = Member.score

    def noted(self, rows, proposal=None):
        joined.append(self.joined)
        return score(self, rows, proposal)

    monkeypatch.setattr(Member, "score", noted)
    drafts = [VARIANTS[name](target) for _ in texts]
    jobs = [lambda text=text, draft=draft: call(target, *text, assistant_model=draft, speculative={"num_assistant_tokens": k}) for text, draft in zip(texts, drafts)]
    found = together(jobs)
    assert all(torch.equal(own, call(target, *text)) for own, text in zip(found, texts)), found
    branches = any(each.may_branch or each.name in joint_module.ON_CACHE for each in drafts[0].all())
    assert any(joined) == (name not in IN_TURNS and not (branches and k != "auto"))
    hf_specdec.disable(target)


@pytest.mark.parametrize("name", ["feature", "medusa", "sequential", "dflash", "parallel"])
def test_drafts_are_shown_the_states_of_their_own_rows(name, monkeypatch):
    """What is proposed in a shared pass is what the same call proposes alone."""
    target, proposed = hf_specdec.enable(tiny_llama()), {}
    texts = [(ids % target.config.vocab_size, new) for ids, new in zip(prompts(3), (48, 24, 30))]
    observe = type(VARIANTS[name](target)).observe

    def noted(self, proposal, logits):
        proposed.setdefault(id(self), []).extend(proposal.listed())
        observe(self, proposal, logits)

    monkeypatch.setattr(type(VARIANTS[name](target)), "observe", noted)

    def job(text, draft):
        return lambda: call(target, *text, assistant_model=draft, speculative={"num_assistant_tokens": 3})

    drafts = [VARIANTS[name](target) for _ in texts]
    with passes(target) as rows:
        together([job(*each) for each in zip(texts, drafts)])
    alone = [VARIANTS[name](target) for _ in texts]
    for each in zip(texts, alone):
        job(*each)()
    assert max(rows) > 1 and all(proposed[id(own)] == proposed[id(other)] for own, other in zip(drafts, alone))
    hf_specdec.disable(target)


@pytest.mark.parametrize("kind", ["the target's cache", "compiled", "compiled, with a drafter of states"])
def test_a_call_has_its_cache_back_when_it_runs_alone_again(kind, monkeypatch):
    model, drafted, widths, parted, compiled = hf_specdec.enable(tiny_model(0)), [], [], [], []
    options = {"compile": "layers"} if "compiled" in kind else {}
    options |= {"num_assistant_tokens": 3} if "states" in kind else {}
    score, part = CachedModel.score, Joint.part

    def counted(self, rows, proposal=None):
        widths.append(len(rows))
        drafted.append((len(rows), 0 if proposal is None else max(proposal.sizes)))
        logits = score(self, rows, proposal)
        if len(rows) > 1:
            compiled.append(self.compiled is not None and bool(self.compiled.usable))
        return logits

    monkeypatch.setattr(CachedModel, "score", counted)
    monkeypatch.setattr(Joint, "part", lambda self, member: (parted.append(member), part(self, member)))

    def job(ids, new: int):
        draft = None if kind == "compiled" else EarlyExitDraft(model, 1) if kind == "the target's cache" else VARIANTS["feature"](model)
        return lambda: call(model, ids, new, speculative=options or True, return_dict_in_generate=True, assistant_model=draft)

    new = (16, 12, 90, 20)
    found = together([job(*text) for text in zip(prompts(), new)])
    assert all(torch.equal(own.sequences, call(model, *text)) for own, text in zip(found, zip(prompts(), new))), found
    assert max(widths) > 1 and parted and widths[-10:] == [1] * 10
    assert compiled and all(compiled) == any(compiled) == ("compiled" in kind)
    assert "compiled" in kind or not any(count for rows, count in drafted if rows > 1)
    cache = found[2].past_key_values if "past_key_values" in found[2] else found[2].cache
    longer = torch.cat([found[2].sequences, torch.tensor([[7, 8]])], 1)
    assert torch.equal(call(model, longer, 8, speculative=True, past_key_values=cache), call(model, longer, 8))


@pytest.mark.parametrize("family", ["Mistral", "Gemma 2", "Qwen3-Next", "Mamba", "BLOOM"])  # windows, states, masks of its own
def test_models_of_other_kinds_take_turns(family):
    if all(each.name != family for each in FAMILIES):
        pytest.skip(f"this transformers has no {family}")
    model = hf_specdec.enable(reference(family, "eager")[0])
    texts = [(ids % 40 + 3, new // 3) for ids, new in zip(prompts(3), NEW)]
    wanted = [call(model, *text) for text in texts]
    found = together([lambda text=text: call(model, *text, speculative={"num_assistant_tokens": 3}) for text in texts])
    assert all(torch.equal(*pair) for pair in zip(found, wanted)), found
    hf_specdec.disable(model)


def test_a_row_that_gets_anothers_keys_is_found_out(monkeypatch):
    model, add = hf_specdec.enable(tiny_model(0)), SlotLayer.add

    def mixed_up(self, other):
        add(self, other)
        self.keys, self.values = self.keys.flip(0), self.values.flip(0)

    monkeypatch.setattr(SlotLayer, "add", mixed_up)
    jobs = [lambda ids=ids: call(model, ids, 40, speculative={"num_assistant_tokens": 3}) for ids in prompts()]
    assert not all(torch.equal(own, call(model, ids, 40)) for own, ids in zip(together(jobs), prompts()))


def test_a_short_call_ends_before_a_long_one_that_was_there_first():
    model, ended = hf_specdec.enable(tiny_model(0)), []

    def job(ids, new: int, name: str):
        return lambda: (call(model, ids, new, speculative=True), ended.append(name))

    together([job(prompts()[1], 200, "long"), job(prompts()[0], 4, "short")])
    assert ended == ["short", "long"]


def test_a_call_that_breaks_off_leaves_the_others(monkeypatch):
    model = hf_specdec.enable(tiny_model(0))

    class Gone:
        left = 12

        def put(self, tokens):
            self.left -= 1
            if not self.left:
                raise RuntimeError("the client has gone")

        def end(self):
            pass

    ids = prompts()
    jobs = [lambda: call(model, ids[1], 100, speculative=True), lambda: call(model, ids[0], 60, speculative=True, streamer=Gone()),
            lambda: call(model, ids[2], 60, speculative=True)]
    found = together(jobs)
    assert "the client has gone" in str(found[1])
    assert torch.equal(found[0], call(model, ids[1], 100)) and torch.equal(found[2], call(model, ids[2], 60))


def test_what_goes_wrong_in_a_shared_pass_is_told_to_all(monkeypatch):
    model, joint = hf_specdec.enable(tiny_model(0)), Joint()

    class Full(joint_module.CachedModel):
        def score(self, *args):
            raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(joint_module, "CachedModel", Full)
    found = together([lambda ids=ids: call(model, ids, 300, speculative=True) for ids in prompts(2)], joint)
    assert all("no memory is left" in str(each) for each in found)
    monkeypatch.undo()
    assert torch.equal(together([lambda: call(model, prompts()[0], 8, speculative=True)], joint)[0], call(model, prompts()[0], 8))


@pytest.mark.parametrize("k, most", [("auto", 3), (6, 6)])
def test_k_auto_leaves_room_for_the_others_and_a_fixed_one_stays(k, most):
    model, proposed = hf_specdec.enable(tiny_model(0)), []
    ids = torch.tensor([[5, 6, 7] * 12])
    jobs = [lambda: call(model, ids, 80, speculative={"num_assistant_tokens": k}, return_dict_in_generate=True)] * 4
    joint, arrive = Joint(), Joint.arrive

    def noted(seat):
        proposed.extend(len(each.asked[1]) for each in joint.rows if each.seat is seat and len(joint.seats) == 4)
        arrive(joint, seat)

    joint.arrive = noted
    found = together(jobs, joint)
    assert all(torch.equal(each.sequences, call(model, ids, 80)) for each in found) and proposed and max(proposed) <= most
    assert k == "auto" or max(proposed) == most


def test_long_prompts_are_read_in_pieces_between_the_others_rounds(monkeypatch):
    monkeypatch.setattr(joint_module, "CHUNK", 8)
    model = hf_specdec.enable(tiny_model(0))
    ids = [prompts()[0], torch.randint(5, 120, (1, 64), generator=torch.Generator().manual_seed(1))]
    wanted = [call(model, ids[0], 80), call(model, ids[1], 12)]
    widths = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: widths.append(args[0].shape[1]))
    found = together([lambda: call(model, ids[0], 80, speculative={"num_assistant_tokens": 3}), lambda: call(model, ids[1], 12, speculative={"num_assistant_tokens": 3})])
    handle.remove()
    assert all(torch.equal(*pair) for pair in zip(found, wanted)) and max(widths) <= 8 + 3
