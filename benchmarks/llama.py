"""FSDP1 units of a Llama 3 of any size, for what is simulated."""

from __future__ import annotations

from dcp_fsdp_osd.layout import Unit

__all__ = ["llama_units"]


def llama_units(
    width: int, blocks: int, vocabulary: int, *, use_orig_params: bool = True
) -> list[Unit]:
    """The root's unit, then one a block; 4096, 32 and 128256 are those of Llama-3-8B."""
    hidden, keys = width * 7 // 2, width // 4
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
