"""llama.cpp through llama-cpp-python: plain decoding and its prompt lookup.

Options: gguf, threads, k, ngram, context, eos.
"""

from __future__ import annotations

from serve import serve


def make(options: dict):
    import llama_cpp
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    common = dict(model_path=options["gguf"], n_ctx=options["context"], n_threads=options["threads"], n_threads_batch=options["threads"], verbose=False)
    lookup = LlamaPromptLookupDecoding(max_ngram_size=options["ngram"], num_pred_tokens=options["k"])
    models = {"plain": llama_cpp.Llama(**common), "lookup": llama_cpp.Llama(**common, draft_model=lookup)}

    def runner(model):
        def run(ids: list[int], max_new_tokens: int) -> list[int]:
            model.reset()  # no prefix of the call before is used again
            tokens: list[int] = []
            for token in model.generate(ids, top_k=1, temp=0.0, repeat_penalty=1.0):
                tokens.append(token)
                if token == options["eos"] or len(tokens) == max_new_tokens:
                    break
            return tokens

        return run

    return {mode: runner(model) for mode, model in models.items()}, {mode: options["weights"] for mode in models}, {"llama-cpp-python": llama_cpp.__version__}


if __name__ == "__main__":
    serve(make)
