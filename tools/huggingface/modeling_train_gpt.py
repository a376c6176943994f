"""A model of train_gpt.py for transformers 5.0 or newer. The model itself is the GPT in train_gpt.py beside this file."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
except ImportError as error:
    raise ImportError("this model needs transformers 5 or newer: pip install 'transformers>=5'") from error
from transformers.modeling_outputs import CausalLMOutput

from .train_gpt import GPT, load_config


trainer = sys.modules[GPT.__module__]
read_weights = trainer.linear


def linear(x: Tensor, *layers: nn.Module, scale: Tensor | None = None) -> Tensor:
    """As the trainer's, which reads the weights of layers. Layers with hooks, and others in their place, such as LoRA's, are
    called."""
    if all(type(layer) in (nn.Linear, nn.Embedding) and not (layer._forward_hooks or layer._forward_pre_hooks) for layer in layers):
        return read_weights(x, *layers, scale=scale)
    parts = [F.linear(x, layer.weight) if isinstance(layer, nn.Embedding) else layer(x) for layer in layers]
    y = torch.cat(parts, dim=-1)
    return y if scale is None else y * scale.to(y.dtype)


trainer.linear = linear

class TrainGPTConfig(PreTrainedConfig):
    """The trainer's variables that describe the model, under `variables`, and what other tools ask of a model.

    Raises ValueError if train_gpt.py does not know a variable, or refuses its value."""

    model_type = "train_gpt"

    def __init__(self, variables: dict | None = None, **kwargs):
        self.variables = variables or {}
        trainer = self.trainer_config()
        super().__init__(**{  # what follows from the variables wins
            "tie_word_embeddings": False, **kwargs, "use_cache": False,  # the GPT ties its table by itself
            "vocab_size": trainer.vocab_size, "hidden_size": trainer.model_dim, "num_hidden_layers": trainer.num_layers,
            "num_attention_heads": trainer.num_heads, "num_key_value_heads": trainer.num_kv_heads,
            "max_position_embeddings": trainer.train_seq_len})

    def trainer_config(self):
        """The Config of train_gpt.py. With AdamW, the table is in float32, as it was exported."""
        return load_config([*(f"{name}={value}" for name, value in self.variables.items()), "OPTIMIZER=adamw"], {})[0]


class TrainGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """Predicts the next token. There is no cache: each new token reads the text before it again, at most the last tokens
    that fit into the context, as in sample.py."""

    config_class = TrainGPTConfig

    def __init__(self, config: TrainGPTConfig):
        super().__init__(config)
        self.gpt = GPT(config.trainer_config()).to(torch.get_default_dtype())
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but raises ValueError if a tensor is missing or unknown."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        wrong = {name: keys for name, keys in info.items() if name.endswith("_keys") and keys}
        if wrong:
            raise ValueError(f"the weights are not those of this model: {wrong}")
        model.gpt.rotary = GPT(model.gpt.config).rotary.to(model.device)  # transformers leaves it empty
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the GPT sets its initial weights itself."""

    def get_input_embeddings(self) -> nn.Module:
        return self.gpt.tok_emb

    def prepare_inputs_for_generation(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs) -> dict:
        """Return the arguments of `forward` for the next token of the rows that generate() has so far, without the others,
        such as a cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask, "logits_to_keep": 1}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
                logits_to_keep: int = 0, return_dict: bool = True, use_cache: bool | None = None,
                position_ids: Tensor | None = None, output_hidden_states: bool | None = None,
                output_attentions: bool | None = None) -> CausalLMOutput | tuple:
        """Score the next tokens of rows. The logits are float32 (B, T or N, V), 0 for padding on the left.

        input_ids: int64 (B, T). attention_mask: (B, T), 0 for padding; the GPT has no mask, so rows with padding on the
        left are read one by one, without it. labels: int64 (B, T), as input_ids or -100: they are shifted here, and the
        loss is in nats a token. logits_to_keep: only the last N logits; 0: all. If it is 1, rows may be longer than the
        context, whose last tokens are read. return_dict: False for a tuple. use_cache is taken and ignored, since there is no
        cache. Raises ValueError for rows that are too long, for positions that do not count from 0, and for outputs that
        this model does not have."""
        if output_hidden_states or output_attentions:
            raise ValueError("this model returns neither hidden states nor attentions: use hooks of its layers")
        counted = torch.arange(input_ids.size(1), device=input_ids.device)
        if position_ids is not None and attention_mask is None and not (position_ids == counted).all():
            raise ValueError("position_ids must be 0, 1, 2, ...: packed rows are not supported")
        context, length = self.config.max_position_embeddings, input_ids.size(1)
        if length > context and logits_to_keep != 1:
            raise ValueError(f"{length} tokens are too many: the model was trained with rows of {context}")
        self.gpt.compute_dtype = self.gpt.skip_weights.dtype
        rows = [input_ids]
        if attention_mask is not None and not attention_mask[:, 0].all():
            padding = (attention_mask.cumsum(1) == 0).sum(1).tolist()
            rows = [row[None, count:] for row, count in zip(input_ids, padding)]
        parts = [self.gpt.hidden(row[:, -context:])[:, -logits_to_keep:] for row in rows]
        kept = min(logits_to_keep or length, length)
        x = torch.cat([F.pad(part, (0, 0, kept - part.size(1), 0)) for part in parts])
        logits = self.gpt.logits(x)[..., :self.config.vocab_size]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        output = CausalLMOutput(loss=loss, logits=logits)
        return output if return_dict is not False else output.to_tuple()
