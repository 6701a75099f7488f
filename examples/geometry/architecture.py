"""Two tiny LLaVA-shaped models (CLIP vision tower, Llama text model) and their processor."""

from dataclasses import dataclass

from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from examples.geometry.draw import IMAGE_SIZE

PATCH_SIZE = 14
IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
VISION_HEAD = 64  # vLLM's attention on CPU needs heads of 32 or more
TEXT_HEAD = 32


@dataclass(frozen=True)
class Size:
    """Widths and depths of one model."""

    vision_width: int
    vision_layers: int
    text_width: int
    text_layers: int


TEACHER = Size(vision_width=64, vision_layers=3, text_width=96, text_layers=2)
STUDENT = Size(vision_width=64, vision_layers=2, text_width=64, text_layers=2)


def build_model(size: Size, tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """A freshly initialised model; seed torch first."""
    vision = CLIPVisionConfig(
        hidden_size=size.vision_width,
        intermediate_size=2 * size.vision_width,
        num_hidden_layers=size.vision_layers,
        num_attention_heads=size.vision_width // VISION_HEAD,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
        projection_dim=size.vision_width,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.text_width,
        intermediate_size=2 * size.text_width,
        num_hidden_layers=size.text_layers,
        num_attention_heads=size.text_width // TEXT_HEAD,
        num_key_value_heads=size.text_width // TEXT_HEAD,
        head_dim=TEXT_HEAD,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=IMAGE_TOKENS,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlavaForConditionalGeneration(config)


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Pictures are taken as they are (no resizing) and normalised to about [-1, 1]."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    images = CLIPImageProcessorPil(
        do_resize=False,
        do_center_crop=False,
        size=size,
        crop_size=size,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
    )
    return LlavaProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
