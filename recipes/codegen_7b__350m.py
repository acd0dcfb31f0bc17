"""CodeGen 1-7B mono (Salesforce/codegen-6B-mono) with CodeGen 350M mono as its draft model: Python from a comment and a signature.

    python recipes/codegen_7b__350m.py --scale full                     real weights, from the hub
    python recipes/codegen_7b__350m.py --scale full --humaneval FILE --execute-code     the same on HumanEval, with pass@1
    python recipes/codegen_7b__350m.py --scale shape --acceptance 0.8   the full shape, random weights, SIMULATED acceptance
    python recipes/codegen_7b__350m.py --scale tiny                     a toy, in seconds
"""

from __future__ import annotations

from recipe_kit import Recipe, main
from transformers import CodeGenConfig

PROMPTS = {
    "hello_world": "# Print Hello World\ndef hello_world():\n",
    "bfs": "# Breadth-first search of a graph, from a start node\ndef bfs(graph, start):\n",
    "topological_sort": "# Topological sort of a directed acyclic graph\ndef topological_sort(graph):\n",
    "tarjan_scc": "# Strongly connected components with Tarjan's algorithm\ndef tarjan_scc(graph):\n",
    "linear_regression": "# Linear regression by gradient descent, with numpy\ndef linear_regression(x, y):\n",
}


def codegen(width: int, layers: int, heads: int, rotary: int, vocabulary: int = 51200) -> CodeGenConfig:
    return CodeGenConfig(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads, rotary_dim=rotary, n_positions=2048, n_ctx=2048,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


RECIPE = Recipe(
    name="codegen_7b__350m",
    title="CodeGen 1-7B mono with CodeGen 350M mono",
    target="Salesforce/codegen-6B-mono",
    draft="Salesforce/codegen-350M-mono",
    prompts=PROMPTS,
    prompt_tokens=32,
    new_tokens=224,
    code=True,
    in_article=True,
    configs={
        "shape": lambda: (codegen(4096, 33, 16, 64), codegen(1024, 20, 16, 32)),
        "tiny": lambda: (codegen(64, 3, 4, 8, 512), codegen(32, 1, 4, 4, 512)),
    },
)

if __name__ == "__main__":
    raise SystemExit(main(RECIPE))
