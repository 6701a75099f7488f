"""A character-level tokenizer, saved and loaded like any other Hugging Face tokenizer."""

from tokenizers import Tokenizer, decoders, models, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = {
    "pad_token": "<pad>",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "image_token": "<image>",
}
CHARACTERS = "0123456789AP?=*+() wh\n"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One id per character; ``<bos>`` is put in front unless ``add_special_tokens=False``."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL.values(), *CHARACTERS])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL["unk_token"]))
    core.decoder = decoders.Fuse()
    bos = SPECIAL["bos_token"]
    core.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
    )
    standard = {name: token for name, token in SPECIAL.items() if name != "image_token"}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        extra_special_tokens={"image_token": SPECIAL["image_token"]},
        clean_up_tokenization_spaces=False,
        **standard,
    )
