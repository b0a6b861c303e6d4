"""FSDP1 units of a Llama 3 of any size, for what is simulated."""

from __future__ import annotations

from dcp_fsdp_osd.layout import Unit

__all__ = ["MODELS", "llama_units"]

MODELS = {"8b": (4096, 32, 1024), "70b": (8192, 80, 1024)}
"""Of Llama 3: width, blocks, and rows of a key projection (8 heads of 128)."""


def llama_units(
    width: int,
    blocks: int,
    vocabulary: int = 128256,
    *,
    keys: int | None = None,
    use_orig_params: bool = True,
) -> list[Unit]:
    """The root's unit, then one a block; `keys`: rows of a key projection, a quarter of `width`
    as 8B has it.
    """
    hidden, keys = width * 7 // 2, keys or width // 4
    block = {
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (keys, width),
        "self_attn.v_proj.weight": (keys, width),
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (hidden, width),
        "mlp.up_proj.weight": (hidden, width),
        "mlp.down_proj.weight": (width, hidden),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    root = {
        "model.embed_tokens.weight": (vocabulary, width),
        "model.norm.weight": (width,),
        "lm_head.weight": (vocabulary, width),
    }
    named = [root] + [
        {f"model.layers.{number}.{name}": shape for name, shape in block.items()}
        for number in range(blocks)
    ]
    return [Unit(tuple(each.items()), use_orig_params=use_orig_params) for each in named]
