"""What is known of a model before it is loaded: sizes, layers and names, from its files alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Linear:
    """One kind of linear layer inside the decoder layers: `count` of them in the whole model."""

    name: str  # the last part of its module path: "q_proj"
    inputs: int
    outputs: int
    count: int
    bias: bool


@dataclass(frozen=True)
class ModelFacts:
    """Sizes are in elements, not bytes. A weight shared by input embedding and output head is counted once."""

    model_type: str  # as in config.json: "llama"
    architecture: str  # the class transformers builds: "LlamaForCausalLM"
    decoder_layer: str | None  # class of one layer: "LlamaDecoderLayer"; None where the family is not known
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # width of the feed-forward block that a token passes through: of a mixture, of all its experts together
    gated: bool  # gate and up projection, as in Llama; False: one projection up, as in GPT-2
    experts: int  # 0: no mixture of experts
    experts_per_token: int
    vocab: int
    tied: bool  # the output head is the input embedding
    max_positions: int | None
    parameters: int  # of the whole model
    active_parameters: int  # those that a token passes through; the same as `parameters` without experts
    layer_parameters: int  # of the largest decoder layer
    embedding_parameters: int  # of input embeddings, learned positions too
    head_parameters: int  # of the output head; 0 where tied
    linears: tuple[Linear, ...]
    dtype: str | None  # of the stored weights: "bfloat16"
    stored_bytes: int | None  # size of the weight files; None where only config.json is there
    chat_template: bool | None  # whether the tokenizer has one; None where there is no tokenizer to look at
