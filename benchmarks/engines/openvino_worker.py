"""OpenVINO GenAI on a CPU: plain decoding and its prompt lookup. It reads GGUF files itself.

Options: gguf (or a folder with an OpenVINO model), threads, k, ngram, eos.
"""

from __future__ import annotations

from serve import serve


def make(options: dict):
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.cache_size = False, 1  # on by default: a prompt asked again would not be read again
    settings = {"INFERENCE_NUM_THREADS": options["threads"], "PERFORMANCE_HINT": "LATENCY", "scheduler_config": scheduler}
    models = {"plain": openvino_genai.LLMPipeline(options["gguf"], "CPU", **settings),
              "lookup": openvino_genai.LLMPipeline(options["gguf"], "CPU", prompt_lookup=True, **settings)}

    def runner(mode: str):
        def run(ids: list[int], max_new_tokens: int) -> list[int]:
            config = openvino_genai.GenerationConfig()
            config.max_new_tokens, config.do_sample, config.eos_token_id, config.stop_token_ids = max_new_tokens, False, options["eos"], {options["eos"]}
            if mode == "lookup":
                config.num_assistant_tokens, config.max_ngram_size = options["k"], options["ngram"]
            return models[mode].generate(openvino.Tensor(np.array([ids], dtype=np.int64)), config).tokens[0]

        return run

    what = {"plain": options["weights"], "lookup": f"{options['weights']}, K {options['k']}"}
    return {mode: runner(mode) for mode in models}, what, {"openvino-genai": openvino_genai.__version__}


if __name__ == "__main__":
    serve(make)
