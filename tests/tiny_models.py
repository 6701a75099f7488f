"""Tiny models with random seeded weights, made in code: nothing is fetched, nothing is committed.

Each maker writes a folder in Hugging Face layout and returns it.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models
from transformers import (
    CLIPVisionConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

PAD, BOS, EOS, IMAGE, THINK_END = 0, 1, 2, 3, 4
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>", "<image>", "</think>"]
# 91 printable ASCII characters: 96 ids with the special ones.
CHARACTERS = [chr(code) for code in range(32, 123)]
VOCABULARY = len(SPECIAL_TOKENS) + len(CHARACTERS)
SPECIAL_IDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
# Sides of the images the tiny vision models take, in pixels, and the features they make of one.
IMAGE_SIDE = 28
LLAVA_FEATURES = 4
INTERNVL_FEATURES = 4


def build_tokenizer(swap: tuple[int, int] | None = None) -> PreTrainedTokenizerFast:
    """96 ids, one per character; `swap` exchanges the tokens of two ids."""
    tokens = [*SPECIAL_TOKENS, *CHARACTERS]
    if swap is not None:
        one, other = swap
        tokens[one], tokens[other] = tokens[other], tokens[one]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens={"image_token": "<image>", "think_end_token": "</think>"},
    )


def llama_config(**changes: object) -> LlamaConfig:
    """Three heads of 16, two key-value heads' worth shared, two layers."""
    settings: dict = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
        **SPECIAL_IDS,
        **changes,
    }
    return LlamaConfig(**settings)


def make_llama(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Rotary positions, grouped key-value heads."""
    torch.manual_seed(seed)
    return save(LlamaForCausalLM(llama_config(**changes)), folder)


def make_gpt2(folder: Path, seed: int = 0) -> Path:
    """Learned positions, tied weights."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        initializer_range=0.3,
        **SPECIAL_IDS,
    )
    return save(GPT2LMHeadModel(config), folder)


def make_mistral(folder: Path, seed: int = 0) -> Path:
    """A sliding window of 8 tokens."""
    torch.manual_seed(seed)
    config = MistralConfig(
        **{**llama_config().to_dict(), "sliding_window": 8, "architectures": None}
    )
    return save(MistralForCausalLM(config), folder)


def make_gemma2(folder: Path, seed: int = 0) -> Path:
    """Capped logits, half of the layers with a sliding window."""
    torch.manual_seed(seed)
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        sliding_window=8,
        query_pre_attn_scalar=16,
        final_logit_softcapping=2.0,
        initializer_range=0.3,
        **SPECIAL_IDS,
    )
    return save(Gemma2ForCausalLM(config), folder)


def make_llava(folder: Path, seed: int = 0, **changes: object) -> Path:
    """CLIP tower and Llama, as in the demo: 28 x 28 pixels, 4 features an image."""
    torch.manual_seed(seed)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIDE,
        patch_size=14,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=llama_config(tie_word_embeddings=True, **changes),
        image_token_index=IMAGE,
        image_seq_length=LLAVA_FEATURES,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        **SPECIAL_IDS,
    )
    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    processor = CLIPImageProcessorPil(do_resize=True, do_center_crop=False, size=side)
    processor.save_pretrained(folder)
    return save(LlavaForConditionalGeneration(config), folder)


def make_internvl(folder: Path, seed: int = 0) -> Path:
    """InternVL tower, pixel shuffle, Qwen3: 28 x 28 pixels, 4 features an image."""
    torch.manual_seed(seed)
    vision = InternVLVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIDE,
        patch_size=7,
    )
    text = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        initializer_range=0.3,
        **SPECIAL_IDS,
    )
    config = InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE,
        image_seq_length=INTERNVL_FEATURES,
        downsample_ratio=0.5,
        **SPECIAL_IDS,
    )
    side = {"height": IMAGE_SIDE, "width": IMAGE_SIDE}
    GotOcr2ImageProcessorPil(size=side).save_pretrained(folder)
    return save(InternVLForConditionalGeneration(config), folder)


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Model and the 96-id tokenizer in one folder."""
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def draw_image(seed: int, side: int = IMAGE_SIDE) -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
