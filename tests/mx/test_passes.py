"""Passes over the kernels: a team of threads for the whole pass, products of one input made at once, and no Python between compiled ones."""

from __future__ import annotations

import copy
import operator
import threading

import pytest
import torch
from torch.fx import symbolic_trace

from hf_specdec import compiled, enable, mx, passes
from hf_specdec.cached_model import CachedModel
from hf_specdec.drafts import PromptLookupDraft
from hf_specdec.mx import MXLinear
from hf_specdec.mx import passes as kernel_passes
from hf_specdec.mx.formats import DENSE
from hf_specdec.mx.kernels import cpu
from hf_specdec.mx.kernels.attention import for_any_number
from hf_specdec.mx.ops import mx_tiles, mx_tiles2, mx_tiles3
from hf_specdec.proposal import Proposal

from ..seeing import FAMILIES
from ..helpers import FULL, OLD_TORCH, VOCAB, build, generated, plain, prompts, speculate, torch_threads

needs_the_compiler = pytest.mark.skipif(OLD_TORCH, reason="this torch does not compile the model: docs/performance.md")
pytestmark = pytest.mark.skipif(cpu.library() is None, reason="the kernels are not available")


@pytest.fixture(params=[2, 3])
def threads(request):
    with torch_threads(request.param):
        yield request.param


@pytest.fixture
def crowded(monkeypatch):
    """Says from now on whether other work displaces this thread."""
    return lambda answer: monkeypatch.setattr(kernel_passes.Crowd, "__call__", lambda crowd: answer)


def layers(shapes, format="mxfp6_e2m3", bias=False):
    torch.manual_seed(0)
    return [MXLinear.from_linear(torch.nn.Linear(k, n, bias=bias), format).prepare() for n, k in shapes]


def llama(layers=2):
    return build("llama", vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4)


def compressed(attention="hf_specdec_rows", format="mxfp6_e2m3", layers=2):
    model = llama(layers).to(torch.bfloat16)
    mx.compress(model, format, lm_head=format, measure=False)
    model.set_attn_implementation(attention)
    return enable(model)


# --- the team -----------------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("format", ["mxfp6_e2m3", "mxint8", *DENSE])
def test_products_by_the_team_have_the_bits_of_those_alone(format, threads):
    chain = layers([(200, 64), (96, 64), (64, 64), (1000, 64), (40, 64)], format, bias=True)
    for rows in (1, 2, 7, 16):
        x = torch.randn(rows, 64).to(torch.bfloat16)
        alone = [layer(x) for layer in chain]
        for _ in range(20):
            together = cpu.together(lambda: [layer(x) for layer in chain])
            assert all(torch.equal(a, b) for a, b in zip(alone, together))


def test_ctrl_c_before_the_first_line_of_what_runs_together_is_no_other_error(monkeypatch):
    class Dropped:  # what ctypes makes of an exception at the start of a callback
        def mx_together(self, body, threads):
            pass

    monkeypatch.setattr(cpu, "library", Dropped)
    with pytest.raises(KeyboardInterrupt):
        cpu.together(lambda: 1)


def test_attention_by_the_team_has_the_bits_of_attention_alone(threads):
    from hf_specdec.mx.attention import rows_attention

    query, key, value = (torch.randn(2, heads, n, 32).to(torch.bfloat16) for heads, n in ((6, 3), (2, 300), (2, 300)))
    alone = rows_attention(query, key, value)
    assert torch.equal(cpu.together(rows_attention, query, key, value), alone)


def test_a_long_session_reads_ahead_of_changing_orders(threads):
    """The same layers in ever other orders, and layers that are gone since: what was learnt is wrong, the products are not."""
    chain = layers([(48 + 16 * i, 64) for i in range(12)])
    x = torch.randn(1, 64)
    alone = {id(layer): layer(x) for layer in chain}
    generator = torch.Generator().manual_seed(1)

    def run():
        for _ in range(300):
            order = torch.randperm(len(chain), generator=generator).tolist()
            passing = layers([(64, 64)])[0]
            assert passing(x).shape == (1, 64)
            del passing
            assert all(torch.equal(chain[i](x), alone[id(chain[i])]) for i in order)

    cpu.together(run)


@pytest.mark.parametrize("error", [KeyError("gone"), KeyboardInterrupt()])
def test_an_exception_comes_out_and_the_next_session_works(error, threads):
    (layer,), x = layers([(64, 64)]), torch.randn(1, 64)

    def fail():
        layer(x)
        raise error

    for _ in range(3):
        with pytest.raises(type(error)):
            cpu.together(fail)
    assert torch.equal(cpu.together(layer, x), layer(x))


def test_sessions_nest_and_other_threads_do_without(threads):
    (layer,), x = layers([(400, 64)]), torch.randn(3, 64)
    expected, found = layer(x), []

    def other():
        found.extend(cpu.together(layer, x) for _ in range(50))

    def inner():
        thread = threading.Thread(target=other)
        thread.start()
        found.extend(cpu.together(layer, x) for _ in range(50))
        thread.join()
        return layer(x)

    assert torch.equal(cpu.together(inner), expected)
    assert len(found) == 100 and all(torch.equal(each, expected) for each in found)


def test_torch_has_its_threads_again_afterwards(threads):
    x = torch.randn(300, 300)
    before = x @ x
    cpu.together(lambda: None)
    assert torch.get_num_threads() == threads and torch.allclose(x @ x, before)


def test_more_threads_than_pieces(threads):
    (layer,), x = layers([(16, 32)]), torch.randn(1, 32)
    assert torch.equal(cpu.together(layer, x), layer(x))


# --- which passes ---------------------------------------------------------------------------------------------------------------


def test_a_model_of_kernels_alone_has_a_runner(threads, crowded):
    crowded(False)
    for name in ("hf_specdec_rows", "hf_specdec_few"):
        model = compressed(name)
        assert passes.runner(model, compiled=True) == (kernel_passes.TOKENS, cpu.together) == (passes.FEW, cpu.together)
        for hidden, most in ((576, 64), (2048, 32), (4096, 16), (8192, 16)):  # what an operator of torch has to do is to stay small
            model.config.hidden_size = hidden
            assert passes.runner(model, compiled=False) == (most, cpu.together)


def test_beside_other_work_long_passes_are_the_teams_too_where_threads_are_few(crowded):
    model = compressed("hf_specdec_few")
    for answer, threads, most in ((True, 4, 1024), (True, 5, 64), (False, 2, 64)):
        crowded(answer)
        with torch_threads(threads):
            assert passes.runner(model, compiled=False)[0] == most
            assert passes.runner(model, compiled=True)[0] == kernel_passes.TOKENS


def elsewhere(function):
    """What the function returns in a thread that is not the main one."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_long_passes_in_a_thread_that_is_not_the_main_one_are_the_teams_too(dtype, crowded):
    crowded(False)
    model, most = compressed("hf_specdec_few").to(dtype), 1024 if for_any_number(dtype) else 128

    def asked():
        return [passes.runner(model, compiled, prompt)[0] for compiled, prompt in ((False, False), (True, False), (True, True))]

    with torch_threads(2):
        assert asked() == [64, 16, 0]
        assert elsewhere(asked) == [most, 16, most]
    with torch_threads(5):
        assert elsewhere(asked) == [64, 16, 0]


def test_compiled_prompts_in_such_a_thread_run_in_the_team_once_they_were_compared(crowded, monkeypatch):
    crowded(False)
    monkeypatch.setattr(compiled, "FLAT", 0)
    monkeypatch.setattr(passes, "options", lambda device, places, whole=True: {"backend": "eager"})
    model, (row,), seen = compressed(), prompts(50), []

    def logits():
        with torch.no_grad():
            return CachedModel(model, 64, compile="layers").score([row])

    together = cpu.together
    monkeypatch.setattr(cpu, "together", lambda run, **inputs: (seen.append(inputs["input_ids"].shape[1]), together(run, **inputs))[1])
    with torch_threads(2):
        first, main, other = logits(), logits(), elsewhere(logits)
    assert seen.count(50) == 1 and torch.equal(main, other) and torch.allclose(first.float(), main.float(), atol=0.1)
    assert compiled._by_layers[model].functions.made


@pytest.mark.parametrize("format", ["bf16", "fp32"])
def test_a_prompt_in_the_team_has_the_bits_of_one_outside(format, threads, crowded):
    model = llama().to(torch.bfloat16 if format == "bf16" else torch.float32)
    mx.compress(model, format, lm_head=format, measure=False)
    model.set_attn_implementation("hf_specdec_few")
    found, calls, (row,) = [], [], prompts(150)
    for answer in (False, True):
        crowded(answer)
        target = CachedModel(model, 256)
        target.runner = lambda *given, **options: (calls.append(answer), cpu.together(*given, **options))[1]
        with torch.inference_mode():
            found.append(target.score([row]))
    assert torch.equal(*found) and calls == [True]


def test_the_books_tell_whether_other_work_displaces_this_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_passes.Crowd, "BOOKS", tmp_path / "schedstat")
    crowd, found = kernel_passes.Crowd(), []
    assert not crowd()  # there are no books
    for ran, waited in ((100, 1), (150, 51), (151, 52), (250, 53), (255, 60), (280, 60)):  # milliseconds
        crowd.BOOKS.write_text(f"{ran * 10**6} {waited * 10**6} 17\n")
        found.append(crowd())
    assert found == [False, True, True, False, False, True]  # two milliseconds say nothing
    crowd.BOOKS.write_text("what?")
    assert not crowd()


@pytest.mark.parametrize("case", ["dense", "sdpa", "dense head", "one thread"])
def test_others_have_none(case, threads, monkeypatch):
    model = llama().to(torch.bfloat16) if case == "dense" else compressed("sdpa" if case == "sdpa" else "hf_specdec_rows")
    if case == "dense head":
        monkeypatch.setattr(kernel_passes, "LARGE", 64)
        model.lm_head = torch.nn.Linear(model.config.hidden_size, VOCAB, dtype=torch.bfloat16)
    if case == "one thread":
        torch.set_num_threads(1)
    assert passes.runner(model, compiled=False) == (0, None)


def test_texts_are_those_of_one_thread(threads):
    model = mx.row_invariant(llama().to(torch.bfloat16))
    rows = prompts(5, 9, 3)
    with torch_threads(1):
        expected = plain(model, rows)
    assert generated(speculate(model, rows, PromptLookupDraft()), rows) == expected


@pytest.mark.parametrize("beside", [False, True])
def test_a_pass_with_few_tokens_runs_in_the_team_and_a_prompt_beside_other_work_alone(beside, threads, monkeypatch, crowded):
    seen = []
    crowded(beside)
    monkeypatch.setattr(cpu, "together", lambda run, **inputs: (seen.append(inputs["input_ids"].shape[1]), run(**inputs))[1])
    model = CachedModel(compressed(), 128)
    text = [1 + i % 30 for i in range(100)]
    with torch.no_grad():
        model.score([text[:70]])
        model.commit([1])
        model.score([text[:71]])
    assert seen == ([70, 1] if beside else [1])


def test_what_reads_images_keeps_no_pass_over_text_from_the_team(threads, monkeypatch, crowded):
    """Its layers stay dense; the pass that runs them, the prompt's, is torch's own."""
    line, seen, answer = next(line for line in FAMILIES if line.name == "Qwen2-VL"), [], dict(do_sample=False, max_new_tokens=8, min_new_tokens=8, pad_token_id=0)
    model = copy.deepcopy(line.model())
    model.set_attn_implementation("sdpa")
    mx.to_tiles(model)
    crowded(True)
    monkeypatch.setattr(kernel_passes, "LARGE", 600)
    assert any(kernel_passes._is_large(part) for part in model.modules())
    monkeypatch.setattr(cpu, "together", lambda run, **inputs: (seen.append(inputs), run(**inputs))[1])
    assert passes.runner(model, compiled=False) == (kernel_passes.CROWDED, cpu.together)
    shown = line.prompts(1)
    expected = model.generate(**shown, **answer)
    assert torch.equal(enable(model).generate(**shown, **answer, speculative=True, num_assistant_tokens=2), expected)
    assert seen and not any("pixel_values" in inputs or inputs.get("inputs_embeds") is not None for inputs in seen)


# --- products of one input --------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.own = torch.nn.ModuleList(layers([(64 + 16 * i, 64) for i in range(count)]))
        self.last = layers([(32, 64)])[0]

    def forward(self, x):
        first, *others = [layer(x) for layer in self.own]
        return self.last(torch.relu(first)), *others


def traced(block, x):
    """The graph that a compiler's backend would get, and what it computes."""
    graphs = []

    def backend(graph, inputs):
        kernel_passes.merge_products(graph)
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        out = torch.compile(block, backend=backend, fullgraph=True)(x)
    (graph,) = graphs
    return [node.target for node in graph.graph.nodes if node.op == "call_function"], out


@pytest.mark.parametrize(("count", "expected"), [(1, []), (2, [mx_tiles2]), (3, [mx_tiles3]), (4, [mx_tiles3]), (5, [mx_tiles3, mx_tiles2])])
def test_products_of_one_input_are_merged(count, expected):
    block, x = Block(count), torch.randn(2, 64)
    MXLinear.gather([*block.own, block.last])
    with torch.no_grad():
        alone = block(x)
    torch._dynamo.reset()
    targets, out = traced(block, x)
    assert [target for target in targets if target in (mx_tiles2, mx_tiles3)] == expected
    assert targets.count(mx_tiles) == count + 1 - sum({mx_tiles2: 2, mx_tiles3: 3}[each] for each in expected)
    assert all(torch.equal(a, b) for a, b in zip(alone, out))


def test_a_graph_without_products_stays_as_it_is():
    graph = symbolic_trace(lambda x: operator.add(x, x))
    before = [node.target for node in graph.graph.nodes]
    kernel_passes.merge_products(graph)
    assert [node.target for node in graph.graph.nodes] == before


def test_the_operators_are_well_formed():
    three, x = layers([(48, 64), (64, 64), (80, 64)]), torch.randn(2, 64)
    MXLinear.gather(three)
    (table, *_), = {layer._place for layer in three[:1]}
    torch.library.opcheck(mx_tiles, (x, table, 2, 80))
    torch.library.opcheck(mx_tiles2, (x, table, 0, 1, 48, 64))
    torch.library.opcheck(mx_tiles3, (x, table, 0, 1, 2, 48, 64, 80))


# --- compiled -----------------------------------------------------------------------------------------------------------------------


@needs_the_compiler
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), *([(torch.bfloat16, 0.03)] if FULL else [])])
@pytest.mark.parametrize("direct", [True, False])
def test_compiled_passes_agree_with_eager_ones(direct, dtype, error, monkeypatch):
    """direct: the generated code calls the library; else by way of Python."""
    if direct and kernel_passes.c_interface() is None:
        pytest.skip("this torch's generated code cannot call the library")
    if not direct:
        monkeypatch.setattr(kernel_passes, "c_interface", lambda: None)
    calls = []
    monkeypatch.setattr(cpu, "multiply", lambda *args, own=cpu.multiply: (calls.append(1), own(*args))[1])
    monkeypatch.setattr(cpu, "multiply_several", lambda *args, own=cpu.multiply_several: (calls.append(len(args[0])), own(*args))[1])
    model = compressed(layers=2 if FULL else 1).to(dtype)
    text = list(range(1, 20))
    with torch_threads(2), torch.no_grad():
        cached = CachedModel(model, 64, compile=True)
        cached.score([text[:12]])
        cached.commit([1])
        eager = cached.score([text[:13]])  # the first pass of a function is compared with an eager one, which is what it returns
        calls.clear()
        found = cached.score([text[:13]])
    assert cached.compiled.usable
    assert (set(calls) == set()) if direct else (set(calls) == {1, 2, 3})
    assert (found - eager).float().norm() < error * eager.float().norm()


@needs_the_compiler
def test_one_layer_compiled_for_all_agrees_with_eager_ones_in_prompts_of_any_length(monkeypatch):
    monkeypatch.setattr(compiled, "FLAT", 0)
    model, text, errors = compressed(), list(range(1, 60)), []
    with torch_threads(2), torch.no_grad():
        for length in (12, 30, 30):  # in the first round functions are made, and what is returned are eager logits
            eager, by_layers = CachedModel(model, 64), CachedModel(model, 64, compile="layers")
            calls = []
            monkeypatch.setattr(cpu, "multiply_several", lambda *args, own=cpu.multiply_several: (calls.append(1), own(*args))[1])
            for i, tokens in enumerate((text[:length], text[: length + 1], text[: length + 2])):
                wanted, found = eager.score([tokens]), by_layers.score([tokens])
                errors.append(float((found - wanted).float().norm() / wanted.float().norm()))
                eager.commit([1])
                by_layers.commit([1])
            assert by_layers.compiled.usable and by_layers.compiled.by_layers
        assert not calls or kernel_passes.c_interface() is None
    assert max(errors) < 0.03
    made = [function.__wrapped__.__name__ for function in compiled._by_layers[model].functions.made.values()]
    assert sum(name.startswith("from_start") for name in made) == 1


@needs_the_compiler
@pytest.mark.parametrize("format", ["mxfp6_e2m3", *DENSE] if FULL else ["bf16"])
def test_a_token_has_the_same_bits_in_compiled_passes_of_one_row_and_of_several(format):
    model, rows, drafted = compressed(format=format), prompts(9, 20, 5), [3, 4, 5]
    with torch_threads(2), torch.no_grad():
        alone, shared, found = [CachedModel(model, 64, compile=True) for _ in rows], CachedModel(model, 64, compile=True), {}
        for row, own in zip(rows, alone):
            own.score([row[:-1]])
            own.commit([1])
        for own in alone:
            shared.cache.add(own.cache)
        shared.lengths = [own.lengths[0] for own in alone]
        for _ in range(2):  # the first pass of a function gives what the eager one gave
            for n in (0, 3):
                proposal = [Proposal.from_lists([drafted[:n]] * many, torch.device("cpu")) for many in (1, len(rows))]
                found[n] = torch.cat([own.score([row], proposal[0]) for own, row in zip(alone, rows)]), shared.score(rows, proposal[1])
    assert shared.compiled.usable and not shared.compiled.untried
    assert all(torch.equal(*pair) for pair in found.values())


@needs_the_compiler
@pytest.mark.parametrize("format", ["mxfp6_e2m3", *DENSE] if FULL else ["mxfp6_e2m3"])
def test_a_token_has_the_same_bits_in_compiled_passes_of_every_width(format):
    """In bfloat16: speculation then gives the text of the same model without a draft, compiled as well."""
    model, text, k = compressed(format=format), list(range(1, 40)), 7

    def passes_over(width):
        with torch_threads(2), torch.no_grad():
            cached = CachedModel(model, 64, compile=True)
            cached.score([text[:20]])
            cached.commit([1])
            parts = []
            for at in range(21, 21 + k + 1, width):
                drafted = Proposal.from_lists([text[at : at + width - 1]], torch.device("cpu"))
                cached.score([text[:at]], drafted)  # the first pass of a function gives what the eager one gave
                parts.append(cached.score([text[:at]], drafted).clone())
                cached.commit([width], drafted.tree, torch.ones(1, width, dtype=torch.bool))
        assert cached.compiled.usable
        return torch.cat(parts, dim=1)

    alone = passes_over(1)
    assert torch.equal(alone, passes_over(k + 1)) and torch.equal(alone[:, :4], passes_over(4)[:, :4])


def test_the_compiler_is_told_to_round_where_eager_mode_does(monkeypatch):
    """Without, bits depend on the width; it takes a model of many layers to show."""
    import torch._inductor

    told = []
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, options: told.append(options))
    passes.options(torch.device("cpu"), 4)["backend"](symbolic_trace(lambda x: x + x), [])
    assert told[0]["emulate_precision_casts"] is True


def test_an_older_torch_has_no_direct_calls(monkeypatch):
    import torch._inductor

    kernel_passes.c_interface.cache_clear()
    monkeypatch.setattr(torch._inductor, "list_options", lambda: [])
    assert kernel_passes.c_interface() is None and kernel_passes.KernelPasses().options() == {}
    kernel_passes.c_interface.cache_clear()
