"""A model of train_gpt.py for transformers. The model itself is the GPT in train_gpt.py, the file beside this one."""

import hashlib
import json
import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .train_gpt import GPT, load_config


class TrainGPTConfig(PreTrainedConfig):
    """The trainer's variables that describe the model, under `variables`, and what other tools ask of a model.

    Raises ValueError if train_gpt.py does not know a variable, or refuses its value."""

    model_type = "train_gpt"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, variables: dict | None = None, **kwargs):
        self.variables = variables or {}
        trainer = self.trainer_config()
        super().__init__(**{  # what follows from the variables wins
            "tie_word_embeddings": False, **kwargs,  # the GPT ties its table by itself
            "vocab_size": trainer.vocab_size, "hidden_size": trainer.model_dim, "num_hidden_layers": trainer.num_layers,
            "num_attention_heads": trainer.num_heads, "num_key_value_heads": trainer.num_kv_heads,
            "max_position_embeddings": trainer.train_seq_len})

    def trainer_config(self):
        """The Config of train_gpt.py. The table is in float32, as it was exported."""
        return load_config(["EMBED_FLOAT32=1", *(f"{name}={value}" for name, value in self.variables.items())], {})[0]


def digest(variables: dict) -> Tensor:
    """The SHA-256 of the trainer's variables, uint8 (32,)."""
    return torch.tensor(list(hashlib.sha256(json.dumps(variables, sort_keys=True).encode()).digest()), dtype=torch.uint8)


@dataclass
class Text:
    """Rows of one length that are read together: their tokens (rows, N), int64, and each block's cache from `start` on."""

    tokens: Tensor
    start: int = 0
    caches: list[dict] = field(default_factory=list)

    def select(self, rows: Tensor) -> "Text":
        """The given rows, int64 (any number,), in their order."""
        caches = [{name: t.index_select(0, rows) for name, t in cache.items()} for cache in self.caches]
        return Text(self.tokens.index_select(0, rows), self.start, caches)


class TextCache(Cache):
    """What generation has read: one Text with all rows or, if some are padded, one for each row."""

    is_compileable = False

    def __init__(self):
        super().__init__(layers=[])
        self.texts: list[Text] = []
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if len(self.texts) == 1:
            self.texts = [self.texts[0].select(beam_idx)]
        else:
            row = beam_idx.new_zeros(1)
            self.texts = [self.texts[i].select(row) for i in beam_idx.tolist()]


class TrainGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """Predicts the next token. A row may be longer than the context only while text is generated: the context then moves
    on by half its length, as in sample.py."""

    config_class = TrainGPTConfig
    base_model_prefix = "gpt"
    _is_stateful = True  # its cache cannot be cut back
    _supports_sdpa = True

    def __init__(self, config: TrainGPTConfig):
        super().__init__(config)
        self.gpt = GPT(config.trainer_config()).to(torch.get_default_dtype())
        self.register_buffer("variables_sha256", digest(config.variables))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, output_loading_info: bool = False, **kwargs):
        """As in transformers, but raises ValueError if a tensor is missing or unknown, or config.json is another model's."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        wrong = {name: keys for name, keys in info.items() if name.endswith("_keys") and keys}
        if wrong:
            raise ValueError(f"the weights are not those of this model: {wrong}")
        if not torch.equal(model.variables_sha256.cpu(), digest(model.config.variables)):
            raise ValueError("config.json and the weights are of different models: their variables differ")
        model.gpt.rotary = GPT(model.gpt.config).rotary.to(model.device)  # transformers leaves it empty
        return (model, info) if output_loading_info else model

    def _init_weights(self, module: nn.Module) -> None:
        """Nothing: the GPT sets its initial weights itself."""

    def get_input_embeddings(self) -> nn.Module:
        return self.gpt.tok_emb

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # a TextCache instead

    def read(self, text: Text, tokens: Tensor, cached: bool, last: bool) -> Tensor:
        """Append tokens, int64 (rows, T), to a text; return the last block's output for each (rows, T, D), or for the
        last of them (rows, 1, D). Raises ValueError if each is asked for, but the context is shorter."""
        if cached and text.caches and tokens.size(1) > 1:  # the GPT's cache grows token by token
            return torch.cat([self.read(text, token, cached, last) for token in tokens.split(1, dim=1)], dim=1)
        text.tokens = torch.cat((text.tokens, tokens), dim=1)
        context = self.config.max_position_embeddings
        excess = text.tokens.size(1) - context
        step = max(1, context // 2)
        start = max(0, math.ceil(excess / step) * step)
        if start and tokens.size(1) > 1 and not last:
            raise ValueError(f"{text.tokens.size(1)} tokens are too many: the model was trained with rows of {context}")
        if not text.caches or start != text.start:
            text.start = start
            text.caches = [{} for _ in self.gpt.blocks] if cached else []
            tokens = text.tokens[:, start:]
        x = self.gpt.hidden(tokens, text.caches or None)
        return x[:, -1:] if last or start else x

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: TextCache | None = None,
                labels: Tensor | None = None, use_cache: bool = False, logits_to_keep: int = 0,
                **kwargs) -> CausalLMOutputWithPast:
        """Score the next tokens of rows.

        input_ids: int64 (B, T). attention_mask: (B, T or more), 0 for padding; the GPT has no mask, so that rows with
        padding on the left are read one by one, without it. labels: int64 (B, T), as input_ids or -100: they are shifted
        here, and the loss is in nats a token. logits_to_keep: only the last N logits; 0: all. past_key_values: what an
        earlier call returned. The logits are float32 (B, T or N, V), 0 for padding on the left. Raises
        ValueError."""
        self.gpt.compute_dtype = self.gpt.skip_weights.dtype
        keeps = use_cache or past_key_values is not None
        cache = TextCache() if past_key_values is None else past_key_values
        if cache.texts:
            rows = [input_ids] if len(cache.texts) == 1 else input_ids.split(1)
        elif attention_mask is None or attention_mask[:, 0].all():
            rows = [input_ids]
        else:
            padding = (attention_mask.cumsum(1) == 0).sum(1).tolist()
            rows = [row[None, count:] for row, count in zip(input_ids, padding)]
        cache.texts = cache.texts or [Text(row[:, :0]) for row in rows]
        cache.length += input_ids.size(1)
        parts = [self.read(text, row, keeps, logits_to_keep == 1) for text, row in zip(cache.texts, rows)]
        length = 1 if logits_to_keep == 1 else input_ids.size(1)
        x = torch.cat([F.pad(part[:, -length:], (0, 0, max(0, length - part.size(1)), 0)) for part in parts])
        logits = self.gpt.logits(x[:, -logits_to_keep:])[..., :self.config.vocab_size]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache if keeps else None)
