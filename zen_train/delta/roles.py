"""What a parameter is, judged from its name and the model type: embedding, head, or a transposed matrix.

The tables cover the model families of Hugging Face transformers. A name that is in no table is an ordinary
matrix stored `[out, in]`. Writers of other families pass their own set of transposed names.
"""

_EMBEDDING_ENDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight", "lm_head.bias", "embed_out.bias")

# transformers' Conv1D stores [in, out]; these families use it for every projection.
_CONV1D_MODEL_TYPES = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
_CONV1D_ENDINGS = ("c_attn.weight", "q_attn.weight", "c_proj.weight", "c_fc.weight")
# Expert stacks kept as [E, in, out] (the usual order is [E, out, in]).
_TRANSPOSED_EXPERT_MODEL_TYPES = frozenset({"gpt_oss", "llama4", "llama4_text"})
_EXPERT_ENDINGS = ("experts.gate_up_proj", "experts.down_proj")


def is_embedding(name: str) -> bool:
    """True for an input embedding table `[vocabulary, hidden]`."""
    return _ends_with_component(name, _EMBEDDING_ENDINGS)


def is_head(name: str) -> bool:
    """True for the output head over the vocabulary (weight or bias)."""
    return _ends_with_component(name, _HEAD_NAMES)


def is_transposed(name: str, model_type: str | None) -> bool:
    """True when the last two dimensions of the parameter are stored as `[in, out]`."""
    if model_type in _CONV1D_MODEL_TYPES:
        return _ends_with_component(name, _CONV1D_ENDINGS)
    return model_type in _TRANSPOSED_EXPERT_MODEL_TYPES and _ends_with_component(name, _EXPERT_ENDINGS)


def default_head_name(model_type: str | None) -> str:
    """The name under which a tied head appears in a model's state dict."""
    return "embed_out.weight" if model_type == "gpt_neox" else "lm_head.weight"


def _ends_with_component(name: str, endings: tuple[str, ...]) -> bool:
    return any(name == ending or name.endswith("." + ending) for ending in endings)
