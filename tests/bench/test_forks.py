import torch

from hf_specdec.bench.forks import Fork, Judge, first_difference

from .conftest import byte_tokenizer, tiny_model


def test_the_first_difference_is_found_also_where_one_output_ends():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


def test_equal_outputs_need_no_judge():
    judge = Judge(tiny_model())
    assert judge.fork([1, 2], [3, 4], [3, 4]) is None
    assert "reference" not in judge.__dict__


def test_a_fork_at_a_clear_gap_is_not_a_near_tie():
    model = tiny_model()
    prompt = [1, 2, 3]
    with torch.no_grad():
        order = model(torch.tensor([prompt])).logits[0, -1].argsort(descending=True).tolist()
    fork = Judge(model).fork(prompt, [order[0], 7], [order[-1], 7])
    assert (fork.position, fork.plain, fork.ours) == (0, order[0], order[-1])
    assert fork.distance > 1 and not fork.near_tie
    assert "NOT explained" in fork.explain(byte_tokenizer())


def test_a_fork_within_the_rounding_error_is_a_near_tie():
    model = tiny_model().to(torch.bfloat16)
    with torch.no_grad():
        model.lm_head.weight[11] = model.lm_head.weight[10]  # two tokens that tie exactly
    prompt = [1, 2, 3]
    fork = Judge(model).fork(prompt, [10], [11])
    assert fork.distance == 0 and fork.rounding > 0 and fork.near_tie
    assert "rule sound, arithmetic differs" in fork.explain(byte_tokenizer())


def test_an_output_that_ends_early_is_never_a_near_tie():
    fork = Judge(tiny_model()).fork([1, 2], [3, 4], [3])
    assert fork == Fork(1, 4, None, fork.top2_gap, float("inf"), fork.rounding) and not fork.near_tie
