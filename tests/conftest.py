"""Fixtures shared by all tests: small models, and markers that name the capability a test needs."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from transformers import MistralConfig

from model.fp8 import te_backend


def small_config(**changes: object) -> MistralConfig:
    """A Mistral of two layers whose sizes FP8 accepts with every recipe."""
    values = dict(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        sliding_window=None,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return MistralConfig(**{**values, **changes})


# What makes a TransformerLayer that of a Mistral, as model/modeling_mistral_fp8_trans.py asks for it.
MISTRAL_LAYER = dict(
    attention_dropout=0.0,
    normalization="RMSNorm",
    activation="swiglu",
    bias=False,
    fuse_qkv_params=True,
    qkv_weight_interleaved=False,
    attn_input_format="bshd",
)


def random_ids(config: MistralConfig, batch: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def _few_threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_model_of_other_tests() -> None:
    te_backend.forget_models()


@pytest.fixture(scope="session")
def only_process_group() -> Iterator[dict[str, str]]:
    """A process group of one, and the environment that describes it. One for all tests: DeepSpeed keeps the first."""
    from train.engine.distributed import init_distributed  # takes seconds to import

    before = dict(os.environ)
    init_distributed()
    described = {key: value for key, value in os.environ.items() if before.get(key) != value}
    os.environ.clear()
    os.environ.update(before)
    yield described
    dist.destroy_process_group()


@pytest.fixture
def process_group(only_process_group: dict[str, str]) -> Iterator[None]:
    """The process group, as if this process had been launched with it; other tests start processes of their own."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in only_process_group.items():
            patch.setenv(key, value)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test marked gpu or multi_gpu skips where the hardware is missing, and says what is."""
    devices = torch.cuda.device_count()
    hopper = devices > 0 and torch.cuda.get_device_capability() >= (9, 0)
    for item, (marker, have, what) in itertools.product(
        items,
        [("gpu", hopper, "a Hopper GPU"), ("multi_gpu", hopper and devices > 1, "two Hopper GPUs")],
    ):
        if item.get_closest_marker(marker) and not have:
            item.add_marker(pytest.mark.skip(reason=f"needs {what}"))


def pytest_collection_finish() -> None:
    """What the imports made stays: DeepSpeed collects garbage six times an engine, which would walk over all of it."""
    gc.collect()
    gc.freeze()
