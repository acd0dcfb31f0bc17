"""Measuring: prompts, the embedded target, the runner and its report. A leaf: nothing in the engine imports it."""
