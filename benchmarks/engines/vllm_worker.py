"""vLLM on a CPU, in bfloat16: plain decoding, or with its n-gram drafts. One mode per process: one engine fits into one.

Options: target (a folder), mode ("plain" or "lookup"), threads, k, ngram, context, eos.
"""

from __future__ import annotations

import os

from serve import serve


def make(options: dict):
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
                   "VLLM_CPU_OMP_THREADS_BIND": f"0-{options['threads'] - 1}", "VLLM_CPU_NUM_OF_RESERVED_CPU": "0", "VLLM_NO_USAGE_STATS": "1"}
    import vllm

    drafts = {"method": "ngram", "num_speculative_tokens": options["k"], "prompt_lookup_max": options["ngram"], "prompt_lookup_min": 1}
    model = vllm.LLM(model=options["target"], dtype="bfloat16", max_model_len=options["context"], max_num_seqs=1, enable_prefix_caching=False,
                     speculative_config=drafts if options["mode"] == "lookup" else None)

    def run(ids: list[int], max_new_tokens: int) -> list[int]:
        settings = vllm.SamplingParams(temperature=0, max_tokens=max_new_tokens, stop_token_ids=[options["eos"]], detokenize=False)
        return list(model.generate([{"prompt_token_ids": ids}], settings, use_tqdm=False)[0].outputs[0].token_ids)

    what = "bfloat16" + (f", K {options['k']}" if options["mode"] == "lookup" else "")
    return {options["mode"]: run}, {options["mode"]: what}, {"vllm": vllm.__version__}


if __name__ == "__main__":
    serve(make)
