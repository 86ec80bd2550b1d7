"""A model by name, or a published shape with random weights, made on the device in its dtype."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .. import smollm2
from ..demo import explain_loading

SMOLLM2 = "smollm2"  # the name that stands for the packaged SmolLM2-135M-Instruct

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
# What the published config.json files say. "tiny" is no published model: it tries this script out on a CPU.
SHAPES = {
    "Qwen3-8B": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"tie_word_embeddings": False},
    "Qwen3-0.6B": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"tie_word_embeddings": True},
    "tiny": _QWEN3
    | {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": 2}
    | {"max_position_embeddings": 256, "tie_word_embeddings": True},
}


@dataclass(frozen=True)
class Source:
    """Where a model comes from: a name for `from_pretrained`, or a shape of SHAPES."""

    name: str
    random: bool = False

    @property
    def file_name(self) -> str:
        """The stem of the model's files."""
        if self.random:
            return f"{self.name}-random"
        if self.name == SMOLLM2:
            return smollm2.HUB_ID.rpartition("/")[2]
        return Path(self.name).name if Path(self.name).is_dir() else self.name.replace("/", "--")


def load(source: Source, device: torch.device, dtype: torch.dtype) -> tuple[PreTrainedModel, str]:
    """Return (stock model in eval mode with SDPA attention, what to call it).

    Raises demo.UsageError or smollm2.ModelUnavailableError.
    """
    if source.random:
        torch.manual_seed(0)
        with torch.device(device):  # weights are filled where they will stay: seconds on a GPU, minutes on a CPU
            config = AutoConfig.for_model(**SHAPES[source.name])
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model.eval(), f"{source.name}, random weights"
    name = smollm2.find_smollm2() if source.name == SMOLLM2 else source.name
    with explain_loading(name):
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).eval(), smollm2.label(name) if source.name == SMOLLM2 else source.name
