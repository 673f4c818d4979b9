"""A random Qwen3-VL of 0.2 M parameters with its tokenizer, processor and template: real files, no hub."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

#: ChatML; a part of a message's content is a text or an image, as in the Qwen-VL families.
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
#: One token a byte, then the special ones, filled up to a round number.
VOCAB_SIZE = 264
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = 259, 260, 261, 262
CONTEXT = 2048
#: A token stands for 32 x 32 pixels of an image: two by two patches of 16.
PIXELS = 32


def vl_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    names = {"vision_start_token": 3, "vision_end_token": 4, "image_token": 5, "video_token": 6}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        extra_special_tokens={name: SPECIAL[at] for name, at in names.items()},
    )


def vl_config(family: str = "qwen3_vl") -> Any:
    """The tiny configuration of ``family``: qwen2_vl, qwen2_5_vl or qwen3_vl."""
    from transformers import AutoConfig

    vision = {
        "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "in_chans": 3},
        "qwen2_5_vl": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "window_size": 64,
            "fullatt_block_indexes": [1],
        },
        "qwen3_vl": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    }[family]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "tie_word_embeddings": False,
        "rope_parameters": {**rope, "mrope_interleaved": True} if family == "qwen3_vl" else rope,
    }
    return AutoConfig.for_model(
        family,
        text_config=text,
        vision_config={"patch_size": 16 if family == "qwen3_vl" else 14, "spatial_merge_size": 2, **vision},
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=False,
        dtype="float32",
    )


def save_processor(directory: Path) -> None:
    """Tokenizer, template and image processor, without weights; needs no forward pass."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "patch_size": 16, "merge_size": 2}
    size = {"shortest_edge": PIXELS**2, "longest_edge": (8 * PIXELS) ** 2}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**half, size=size),
        tokenizer=vl_tokenizer(),
        video_processor=Qwen3VLVideoProcessor(**half),
        chat_template=TEMPLATE,
    ).save_pretrained(directory)


def vl_directory(directory: Path) -> str:
    """What passes for a vision-language model, but for weights: enough for simulated engines."""
    directory.mkdir(exist_ok=True)
    save_processor(directory)
    vl_config().save_pretrained(directory)
    return str(directory)


def saved_vl(directory: Path, seed: int = 0) -> str:
    """The whole model with random weights, about 1 MB; returns its directory. It never samples the ids of vision."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    vl_directory(directory)
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(vl_config())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:  # sharper than transformers' initial 0.02: else images hardly change a probability
                torch.nn.init.normal_(weight, std=0.15 if "visual" in name else 0.1)
        # A direction that every token's state has, and of which those ids want nothing.
        model.model.language_model.embed_tokens.weight[:, 0] = 3.0
        model.lm_head.weight[VISION_START : VIDEO_PAD + 1, 0] = -20.0
    model.save_pretrained(directory)
    return str(directory)


def picture(width: int, height: int, seed: int = 0, format: str = "PNG") -> bytes:
    """A random image file."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format=format)
    return out.getvalue()
