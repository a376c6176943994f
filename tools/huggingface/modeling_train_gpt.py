"""A model of train_gpt.py for transformers 5.0 or newer. The model itself is the GPT in train_gpt.py beside this file."""

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
except ImportError as error:
    raise ImportError("this model needs transformers 5 or newer: pip install 'transformers>=5'") from error
from transformers.modeling_outputs import CausalLMOutputWithPast

from .kv_cache import hidden, window_start
from .train_gpt import GPT, load_config


# What transformers calls the cache of keys and values: "cache" since 5.24, "past_key_values" before.
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
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
    keys_to_ignore_at_inference = [CACHE]

    def __init__(self, variables: dict | None = None, use_cache: bool = True, **kwargs):
        self.variables = variables or {}
        self.use_cache = use_cache
        trainer = self.trainer_config()
        super().__init__(**{  # what follows from the variables wins
            "tie_word_embeddings": False, **kwargs,  # the GPT ties its table by itself
            "vocab_size": trainer.vocab_size, "hidden_size": trainer.model_dim, "num_hidden_layers": trainer.num_layers,
            "num_attention_heads": trainer.num_heads, "num_key_value_heads": trainer.num_kv_heads,
            "max_position_embeddings": trainer.train_seq_len})

    def trainer_config(self):
        """The Config of train_gpt.py. With AdamW, the table is in float32, as it was exported."""
        return load_config([*(f"{name}={value}" for name, value in self.variables.items()), "OPTIMIZER=adamw"], {})[0]


class TrainGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """Predicts the next token, with transformers' caches or without."""

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

    def prepare_inputs_for_generation(self, input_ids: Tensor, next_sequence_length: int | None = None,
                                      past_key_values: Cache | None = None, attention_mask: Tensor | None = None,
                                      cache_position: Tensor | None = None, use_cache: bool | None = None,
                                      cache: Cache | None = None, **kwargs) -> dict:
        """Return the arguments of `forward` for the next token of the rows that generate() has so far. The number of new tokens is
        next_sequence_length, or in older versions the length of cache_position, or that of input_ids. Rows longer than the
        context are read from window_start on; when that moves, into a new cache."""
        context = self.config.max_position_embeddings
        past_key_values = past_key_values if cache is None else cache
        if past_key_values is None and use_cache:
            past_key_values = DynamicCache()
        if past_key_values is None:
            input_ids = input_ids[:, window_start(input_ids.size(1), context):]
        else:
            if next_sequence_length is None:
                next_sequence_length = input_ids.size(1) if cache_position is None else len(cache_position)
            first = getattr(past_key_values, "first_token", 0)  # where in the rows the cache begins
            length = first + past_key_values.get_seq_length() + next_sequence_length
            start = window_start(length, context)
            if start == first and next_sequence_length > 0:
                input_ids = input_ids[:, -next_sequence_length:]
            else:
                input_ids = input_ids[:, start - length:]
                past_key_values = DynamicCache()
                past_key_values.first_token = length - input_ids.size(1)
        return {"input_ids": input_ids, "attention_mask": attention_mask, CACHE: past_key_values, "use_cache": use_cache,
                "logits_to_keep": 1}

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None,
                logits_to_keep: int = 0, return_dict: bool = True, use_cache: bool | None = None,
                position_ids: Tensor | None = None, output_hidden_states: bool | None = None,
                output_attentions: bool | None = None,
                past_key_values: Cache | None = None, cache: Cache | None = None) -> CausalLMOutputWithPast | tuple:
        """Score the next tokens of rows. The logits are float32 (B, T or N, V), 0 for padding on the left.

        input_ids: int64 (B, T), those that follow the tokens in cache (past_key_values). attention_mask: (B, tokens in the cache
        + T), 0 for padding on the left. labels: int64 (B, T), as input_ids or -100: they are shifted here, and the loss is in nats
        a token. logits_to_keep: only the last N logits; 0: all. return_dict: False for a tuple. use_cache: return the cache;
        None: as the config says. Raises ValueError for rows that are too long, for positions that do not
        follow those in the cache, and for outputs that this model does not have."""
        if output_hidden_states or output_attentions:
            raise ValueError("this model returns neither hidden states nor attentions: use hooks of its layers")
        cache = past_key_values if cache is None else cache
        past = 0 if cache is None else int(cache.get_seq_length())
        length = past + input_ids.size(1)
        counted = torch.arange(past, length, device=input_ids.device)
        if position_ids is not None and attention_mask is None and not (position_ids == counted).all():
            raise ValueError(f"position_ids must count up from {past}: packed rows are not supported")
        context = self.config.max_position_embeddings
        if length > context:
            raise ValueError(f"{length} tokens are too many: the model was trained with rows of {context}")
        self.gpt.compute_dtype = self.gpt.skip_weights.dtype
        is_text = None
        if attention_mask is not None and not attention_mask[:, 0].all():
            is_text = attention_mask.cumsum(1)[:, -length:] > 0
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if cache is None and (use_cache or is_text is not None):
            cache = DynamicCache()
        x = self.gpt.hidden(input_ids) if cache is None else hidden(self.gpt, input_ids, cache, is_text)
        logits = self.gpt.logits(x[:, -logits_to_keep:])[..., :self.config.vocab_size]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache if use_cache else None})
        return output if return_dict is not False else output.to_tuple()
