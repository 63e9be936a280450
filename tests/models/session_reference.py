"""What a Session must equal: plain transformers forwards, from scratch, of merged weights."""

import copy

import torch
from transformers.pytorch_utils import Conv1D


class Reference:
    """A model's logits without a cache, its adapter merged into a copy of the weights."""

    def __init__(self, model, adapter=None):
        self.model, self.adapter, self.merged = model, adapter, {0.0: model}

    def at(self, strength):
        if strength not in self.merged:
            model = copy.deepcopy(self.model)
            for module in model.modules():
                module._forward_hooks.clear()
            modules = dict(model.named_modules())
            for name, update in self.adapter.updates.items():
                delta = strength * update.scaling * update.up.data @ update.down.data
                module = modules[name]
                module.weight.data += delta.T if isinstance(module, Conv1D) else delta
            self.merged[strength] = model
        return self.merged[strength]

    def logits(self, ids, strength=0.0):
        """[len(ids), vocab]"""
        with torch.no_grad():
            return self.at(strength)(torch.tensor([list(ids)]), use_cache=False).logits[0]


TARGETS = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "qwen2": ["k_proj", "o_proj", "gate_proj"],
    "gemma3": ["q_proj", "k_proj", "up_proj"],
    "gpt2": ["c_attn", "c_fc"],
}
