"""The training text: the target's own laws, shards that are whole or absent, prompts from anywhere."""

from __future__ import annotations

import copy
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from hf_specdec.cli import app
from hf_specdec.training import RunConfig, Trainer
from hf_specdec.training.answers import continue_texts, judge_texts, stops
from hf_specdec.training.batches import split
from hf_specdec.training.data import make_data, make_on_policy
from hf_specdec.training.prompts import OPENINGS, TURNS, chat_parts, find_prompts, openings, prompt_ids
from hf_specdec.training.shards import TOP, Shard, refuse_foreign, shard_files

from ..helpers import build, tiny_llama


def texts_of(shard):
    return [slice(int(a), int(b)) for a, b in zip(shard.starts, shard.starts[1:])]


def test_every_law_in_a_shard_is_what_the_target_says_at_that_position(target, data):
    shard = Shard.load(shard_files(data)[0])
    checked = 0
    for text in texts_of(shard)[:4]:
        tokens, laws = shard.tokens[text].long(), shard.logprobs[text].float()
        expected = target(tokens[None]).logits[0].log_softmax(-1)
        asked = torch.isfinite(laws[:, 0])
        best = expected.topk(TOP)
        torch.testing.assert_close(laws[asked], best.values[asked], atol=4e-3, rtol=4e-3)
        assert torch.equal(shard.ids[text][asked][:, 0].long(), best.indices[asked][:, 0])
        checked += int(asked.sum())
    assert checked > 50


def test_the_user_turn_and_the_answer_are_both_labelled(data, tokenizer):
    before, after = chat_parts(tokenizer)
    shard = Shard.load(shard_files(data)[0])
    for text in texts_of(shard):
        asked = torch.isfinite(shard.logprobs[text][:, 0])
        assert shard.tokens[text][: len(before)].tolist() == before
        answer = shard.tokens[text].tolist().index(after[-1])
        assert bool(asked[answer])  # what follows the template's last token
        assert bool(asked[len(before) :].any())


def test_judging_a_text_gives_the_laws_that_writing_it_gave(target):
    written = continue_texts(target, [[3, 4, 5], [7, 8, 9, 10, 11]], 12, 0, [60], do_sample=True)
    judged = judge_texts(target, [text.tokens for text in written], [text.first for text in written])
    for wrote, saw in zip(written, judged):
        n = len(wrote.ids)
        assert torch.equal(wrote.ids[:, 0], saw.ids[:n, 0])
        torch.testing.assert_close(wrote.logprobs.float(), saw.logprobs[:n].float(), atol=4e-3, rtol=4e-3)


def test_a_run_that_was_stopped_goes_on_and_makes_the_same_shards(target, tokenizer, data, tmp_path):
    files = shard_files(data)
    make_data(tmp_path, target, tokenizer, tokens=1, rows=8, new_tokens=24, seed=5)
    assert len(shard_files(tmp_path)) == 1
    (tmp_path / "000001.partial").write_bytes(b"half of a shard")
    make_data(tmp_path, target, tokenizer, tokens=3000, rows=8, new_tokens=24, seed=5)
    assert [path.name for path in shard_files(tmp_path)] == [path.name for path in files]
    for one, other in zip(shard_files(tmp_path), files):
        assert torch.equal(Shard.load(one).tokens, Shard.load(other).tokens)


def test_progress_is_told_inside_of_a_shard_and_ends_with_what_there_is(target, tokenizer, tmp_path):
    told = []
    make_data(tmp_path, target, tokenizer, tokens=200, rows=8, new_tokens=24, seed=5, progress=lambda done, tokens: told.append(done))
    total = sum(len(Shard.load(path).tokens) for path in shard_files(tmp_path))
    assert told[0] == 0 and told == sorted(told) and told[-1] == total and len(told) > 10 and max(told[:-1]) < 200
    assert len(set(told)) == len(told)  # and nothing twice
    make_data(tmp_path, target, tokenizer, tokens=200, rows=8, new_tokens=24, seed=5, progress=lambda done, tokens: told.append(done))
    assert told[-1] == told[-2] == total  # nothing was left to do


@pytest.mark.parametrize("name", ["job.json", "notes.txt", "model.safetensors", "sub"])
def test_a_folder_of_something_else_is_refused_by_name_before_anything_is_loaded(name, target, tokenizer, tmp_path):
    (tmp_path / ".hidden").touch()
    if name == "sub":
        (tmp_path / name).mkdir()
    elif name == "model.safetensors":
        target.save_pretrained(tmp_path)
        (tmp_path / "config.json").unlink()
    else:
        (tmp_path / name).write_text("{}")
    before, words = sorted(tmp_path.iterdir()), f"data: {tmp_path} holds {name}, which is no training shard"
    with pytest.raises(ValueError, match=re.escape(words)):
        make_data(tmp_path, target, tokenizer, tokens=10, rows=2, new_tokens=4)
    bad = CliRunner().invoke(app, ["train", "no/such/target", "--data", str(tmp_path), "--out", str(tmp_path / "out")])
    assert bad.exit_code == 2 and words in bad.output and "Loading" not in bad.output and sorted(tmp_path.iterdir()) == before


def test_a_folder_of_shards_is_known_by_them_and_by_half_a_shard(target, tokenizer, data, tmp_path):
    (tmp_path / "000000.partial").write_bytes(b"half of a shard")
    (tmp_path / "states").mkdir()
    refuse_foreign(tmp_path)
    shutil.copy(shard_files(data)[0], tmp_path)
    (tmp_path / "README.md").write_text("what this is")
    refuse_foreign(tmp_path)
    refuse_foreign(tmp_path / "new")


def test_given_prompts_are_answered_in_order(target, tokenizer, tmp_path):
    before, after = chat_parts(tokenizer)
    prompts = ["ABC", "HELLO", "XYZ"]
    make_data(tmp_path, target, tokenizer, tokens=10**9, rows=2, new_tokens=5, prompts=prompts)
    starts = [Shard.load(path) for path in shard_files(tmp_path)]
    found = [shard.tokens[text].tolist() for shard in starts for text in texts_of(shard)]
    for prompt, tokens in zip(prompts, found, strict=True):
        head = before + tokenizer(prompt, add_special_tokens=False).input_ids + after
        assert tokens[: len(head)] == head and 1 <= len(tokens) - len(head) <= 5


def test_text_of_the_drafts_own_is_judged_by_the_target(target, data, tmp_path):
    draft = tiny_llama(9)
    path = make_on_policy(tmp_path, draft, target, split(data)[0], 200, [60], rows=4, new_tokens=12)[0]
    shard = Shard.load(path)
    text = texts_of(shard)[0]
    asked = torch.isfinite(shard.logprobs[text][:, 0])
    expected = target(shard.tokens[text].long()[None]).logits[0].log_softmax(-1).topk(TOP)
    assert torch.equal(shard.ids[text][asked][:, 0].long(), expected.indices[asked][:, 0])


@pytest.mark.parametrize("harm", ["cut", "foreign", "offsets", "vocabulary"])
def test_a_bad_shard_is_refused_by_name(data, tmp_path, harm):
    whole, path = shard_files(data)[0], tmp_path / "bad.safetensors"
    shard, vocab = Shard.load(whole), 61
    if harm == "cut":
        path.write_bytes(whole.read_bytes()[:-100])
    elif harm == "foreign":
        save_file({"tokens": shard.tokens}, path)
    elif harm == "offsets":
        shard.starts[-1] += 5
        shard.save(path)
    else:
        shard.save(path)
        vocab = 20
    with pytest.raises(ValueError, match="bad.safetensors"):
        Shard.load(path, vocab)


def test_openings_repeat_with_their_seed_and_every_kind_has_its_turn():
    assert openings(3, 5, 7) == openings(3, 5, 7) != openings(3, 5, 8)
    assert {openings(number, 1, 0)[0] for number in range(len(TURNS))} == set(OPENINGS)


def test_prompts_come_from_lines_columns_and_turns(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"turns": ["first", "second"]}\n{"prompt": "other"}\n')
    assert list(find_prompts(str(tmp_path / "a.txt")).values()) == ["one", "two"]
    with pytest.raises(ValueError, match="^column: .*a.txt has none"):
        find_prompts(str(tmp_path / "a.txt"), "question")
    assert list(find_prompts(str(tmp_path / "b.jsonl")).values()) == ["first", "other"]
    (tmp_path / "c.jsonl").write_text(json.dumps({"question": "?"}))
    assert list(find_prompts(str(tmp_path / "c.jsonl"), "question").values()) == ["?"]
    with pytest.raises(ValueError, match="question.*--column"):
        find_prompts(str(tmp_path / "c.jsonl"))
    with pytest.raises(ValueError, match="not a file"):
        find_prompts(str(tmp_path / "none.txt"))
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(ValueError, match="empty.txt is empty"):
        find_prompts(str(tmp_path / "empty.txt"))
    (tmp_path / "latin.txt").write_bytes(b"gr\xfcn")
    with pytest.raises(ValueError, match="latin.txt: not text in UTF-8"):
        find_prompts(str(tmp_path / "latin.txt"))
    with pytest.raises(ValueError, match="name is missing"):
        find_prompts("hub:")
    (tmp_path / "d.jsonl").write_text('{"prompt": "good"}\n\nnot json\n')
    with pytest.raises(ValueError, match="d.jsonl:3: not JSON"):
        find_prompts(str(tmp_path / "d.jsonl"))


@pytest.mark.parametrize(("row", "what"), [
    ('"a prompt"', "no JSON object, but str"), ("5", "but int"), ('["prompt"]', "but list"),
    ('{"prompt": 5}', "no text in 'prompt'"), ('{"prompt": null}', "no text"), ('{"prompt": " "}', "no text"), ('{"turns": []}', "no text in 'turns'"),
    ('{"turns": [{"role": "user"}]}', "no text in 'turns'"),
])
def test_a_row_without_a_prompt_is_named_by_its_line(row, what, tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "good"}\n\n' + row + "\n")
    with pytest.raises(ValueError, match=f"x.jsonl, line 3 .*{what}"):
        find_prompts(str(tmp_path / "x.jsonl"))


def test_shards_of_another_target_are_refused_before_any_are_made(target, tokenizer, data, tmp_path):
    other = tiny_llama(4)
    with pytest.raises(ValueError, match="000000.safetensors: written by another target"):
        make_data(data, other, tokenizer, tokens=100_000)
    with pytest.raises(ValueError, match="written by another target"):
        Trainer(other, data, tmp_path, RunConfig(layers=(1,), head=None))
    assert make_data(data, copy.deepcopy(target).bfloat16(), tokenizer, tokens=10, new_tokens=24) == shard_files(data)  # the same in another dtype



def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer):
    class Plain:
        chat_template = None

    with pytest.raises(ValueError, match="chat template"):
        chat_parts(Plain())


PROMPTS = [f"HELLO{letter}" for letter in "ABCDEFGH"]


def test_given_prompts_go_without_a_chat_template_as_they_stand(target, tokenizer, tmp_path):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    make_data(tmp_path, target, plain, tokens=10**9, rows=2, new_tokens=5, prompts=PROMPTS[:2])
    shard = Shard.load(shard_files(tmp_path)[0])
    for prompt, text in zip(PROMPTS, texts_of(shard)):
        head = plain(prompt).input_ids
        assert shard.tokens[text].tolist()[: len(head)] == head and bool(torch.isfinite(shard.logprobs[text][len(head) - 1 : -1, 0]).all())
    with pytest.raises(ValueError, match="cannot make up prompts"):
        make_data(tmp_path / "own", target, plain, tokens=10)


def made(folder, target, tokenizer, tokens=60, **changed):
    job = {"rows": 2, "new_tokens": 5, "seed": 1, "prompts": PROMPTS} | changed
    return make_data(folder, target, tokenizer, tokens, **job)


@pytest.mark.parametrize(("name", "value"), [("prompts", ["OTHERS", *PROMPTS[1:]]), ("prompts", None), ("new_tokens", 6), ("seed", 2), ("rows", 3)])
def test_shards_of_another_job_are_refused_and_nothing_is_made(target, tokenizer, tmp_path, name, value):
    files = made(tmp_path, target, tokenizer, tokens=20)
    with pytest.raises(ValueError, match=f"^{name}: .*000000.safetensors .*; give what it was made with, or name another folder"):
        made(tmp_path, target, tokenizer, **{name: value})
    assert shard_files(tmp_path) == files
    if name in ("seed", "rows"):  # of no weight where all tokens are there
        assert made(tmp_path, target, tokenizer, tokens=20, **{name: value}) == files


def test_shards_of_the_same_job_and_those_that_do_not_say_are_gone_on_from(target, tokenizer, tmp_path):
    files = made(tmp_path, target, tokenizer, tokens=20)
    more = made(tmp_path, target, tokenizer, tokens=10**6, prompts=[*PROMPTS, "MORE"])
    assert len(files) < len(more) == 5
    for path in more:
        shard = Shard.load(path)
        del shard.notes["job"]
        shard.save(path)
    assert made(tmp_path, target, tokenizer, tokens=20, new_tokens=9) == more


def test_a_run_of_the_drafts_own_text_that_was_stopped_goes_on_as_it_would_have(target, data, tmp_path):
    draft, (parts, _) = tiny_llama(9), split(data)
    for goals, name in [((400,), "whole"), ((1, 400), "parts")]:
        for tokens in goals:
            make_on_policy(tmp_path / name, draft, target, parts, tokens, [60], rows=4, new_tokens=12)
    whole, broken = ([Shard.load(path).tokens.tolist() for path in shard_files(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == broken and len(whole) > 1 and whole[0][:8] != whole[1][:8]


def test_a_prompt_longer_than_the_context_is_named_before_any_shard_is_made(target, tokenizer, tmp_path):
    long = "A" * (target.config.max_position_embeddings + 1)
    (tmp_path / "asked.txt").write_text(f"HELLO\n\n{long}\n")
    with pytest.raises(ValueError, match=r"^prompts: .*asked.txt, line 3 has \d+ tokens, and the target's context holds"):
        make_data(tmp_path / "data", target, tokenizer, 10**6, 1, 5, prompts=find_prompts(str(tmp_path / "asked.txt")))
    with pytest.raises(ValueError, match="^prompts: prompt 2 has"):
        make_data(tmp_path / "data", target, tokenizer, 10**6, 1, 5, prompts=["HELLO", long])
    assert not (tmp_path / "data").exists()
    make_data(tmp_path / "data", target, tokenizer, 5, 1, 5, prompts=["HELLO", long])  # which is not reached


def test_the_split_of_a_data_set_is_the_one_named_train_or_the_only_one(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    of = {name: datasets.Dataset.from_dict({"prompt": [name]}) for name in ("train", "test", "other")}
    for folder, names in {"both": ("train", "test"), "one": ("test",), "none": ("test", "other")}.items():
        datasets.DatasetDict({name: of[name] for name in names}).save_to_disk(tmp_path / folder)
    of["other"].save_to_disk(tmp_path / "plain")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "test.jsonl").write_text('{"prompt": "file"}\n')
    found = {source: list(find_prompts(source.replace("@", f"{tmp_path}/")).values()) for source in ("@both", "hub:@both:test", "@one", "hub:@plain", "@files")}
    assert found == {"@both": ["train"], "hub:@both:test": ["test"], "@one": ["test"], "hub:@plain": ["other"], "@files": ["file"]}
    for source, words in {"@none": "no split 'train', but \\['test', 'other'\\]", "hub:@both:dev": "no split 'dev'", "hub:@files:dev": "no split 'dev'", "hub:@plain:dev": "no splits; leave 'dev' out"}.items():
        with pytest.raises(ValueError, match=f"^prompts: .*{words}"):
            find_prompts(source.replace("@", f"{tmp_path}/"))


def test_a_prompt_that_is_no_unicode_is_named_by_its_line(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"prompt": "\\u4f60"}\n{"prompt": "a\\ud800"}\n')
    with pytest.raises(ValueError, match="x.jsonl, line 2 is not valid Unicode"):
        find_prompts(str(tmp_path / "x.jsonl"))


def test_prompts_that_are_not_there_are_not_asked_of_the_hub():
    with pytest.raises(ValueError, match="^prompts: missing.jsonl is not a file; .* or hub:NAME"):
        find_prompts("missing.jsonl")


# --- where texts end ----------------------------------------------------------------------------------------------------------


def test_answers_and_turns_end_at_every_token_that_ends_the_models_own(target, tokenizer, tmp_path):
    model = copy.deepcopy(target)
    model.generation_config.eos_token_id = [5, 60]
    assert stops(model, tokenizer) == [60, 5] and stops(target, tokenizer) == [60]
    _, after = chat_parts(tokenizer)
    for path in make_data(tmp_path, model, tokenizer, 1500, rows=8, new_tokens=24, seed=5):
        shard = Shard.load(path)
        assert all(5 not in shard.tokens[text].tolist()[:-1] for text in texts_of(shard))


def test_a_target_that_ends_nowhere_writes_as_far_as_it_may(target, tokenizer, tmp_path):
    endless = copy.deepcopy(tokenizer)
    endless.eos_token = None
    assert stops(target, endless) == []
    (path,) = make_data(tmp_path, target, endless, 10**6, rows=4, new_tokens=8, prompts=["ABC", "HELLO"])
    assert Shard.load(path).starts.diff().tolist() == [len(ids) + 8 for ids in prompt_ids(endless, ["ABC", "HELLO"])]


def test_no_text_is_longer_than_the_context(tokenizer, tmp_path):
    target = build("gpt2", 0, vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=64)  # whose positions are a table: it fails beyond
    draft = build("gpt2", 1, vocab_size=61, n_embd=32, n_layer=1, n_head=2, n_positions=48)
    full = make_data(tmp_path / "given", target, tokenizer, 10**6, rows=4, new_tokens=30, prompts=["A" * 60, "BC" * 3])
    assert int(Shard.load(full[0]).starts.diff().max()) == 64
    with pytest.raises(ValueError, match="prompt 1 has 64 tokens, and the target's context holds 64 with the answer"):
        make_data(tmp_path / "long", target, tokenizer, 10**6, rows=4, new_tokens=30, prompts=["A" * 61])
    own = make_data(tmp_path / "own", target, tokenizer, 500, rows=4, new_tokens=30, seed=3)
    assert all(int(Shard.load(path).starts.diff().max()) <= 64 for path in own)
    written = make_on_policy(tmp_path / "on_policy", draft, target, split(tmp_path / "own")[0], 300, [60], rows=4)
    assert all(int(Shard.load(path).starts.diff().max()) <= 48 for path in written)
    small = build("gpt2", 0, vocab_size=61, n_embd=32, n_layer=2, n_head=2, n_positions=6)
    with pytest.raises(ValueError, match="context of 6 tokens has no room"):
        make_data(tmp_path / "small", small, tokenizer, 100, rows=4, new_tokens=30)
