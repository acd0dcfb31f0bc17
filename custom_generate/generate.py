"""`model.generate(..., custom_generate="<this repository or folder>", trust_remote_code=True)`."""


def generate(model, speculative=True, **kwargs):
    """The `generate` of `hf_specdec`, for a model that has not been enabled; all arguments of an enabled one."""
    from hf_specdec.integration import generate as speculative_generate

    return speculative_generate(model, speculative=speculative, **kwargs)
