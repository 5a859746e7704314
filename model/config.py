"""Read and check configurations of Mistral, Llama and Qwen3 models, and derive parameter counts, FLOPs and memory.

`load_config` imports transformers, which takes seconds. `load_sizes` imports transformers only for configurations with
RoPE scaling or missing keys.
"""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import TYPE_CHECKING, Any

from model.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import MistralConfig


GIB = 2**30
CONFIGS = Path(__file__).parent / "configs"

# Keys that must be equal for one configuration to load the weights of another.
ARCHITECTURE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "tie_word_embeddings",
)

POSITIVE = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings".split()
)
# Supported model types, with the sizes that their config.json may omit or set to null.
MODEL_TYPES = {
    "mistral": ("head_dim",),
    "llama": ("head_dim", "sliding_window"),
    "qwen3": ("sliding_window",),
}
# In an exported config.json: the max_seq_length of the training. Other programs ignore it.
TRAINED_LENGTH = "trained_sequence_length"
# transformers treats 0 as a window in which a token sees nothing. With 1, a token sees only itself, and its query and
# key have no effect.
WINDOW = "sliding_window"
# Keys that change the network, with the only value that is supported. null is the same as this value.
FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0,
    "pruned_heads": {},
    **dict.fromkeys(
        "add_cross_attention attention_bias is_encoder_decoder mlp_bias qk_layernorm qk_norm rope_interleaved "
        "use_bidirectional_attention use_qk_norm use_sliding_window".split(),
        False,
    ),
    **dict.fromkeys(
        "embedding_multiplier logit_scale logits_scaling partial_rotary_factor pretraining_tp "
        "residual_multiplier".split(),
        1,
    ),
    **dict.fromkeys(
        "attention_multiplier attn_logit_softcapping clip_qkv final_logit_softcapping no_rope_layers "
        "num_experts num_experts_per_tok num_local_experts query_pre_attn_scalar".split()
    ),
}
# Other keys of config.json files that do not change the network. Some of them are keys of other tools, or of older
# versions of transformers, which also wrote the options of text generation.
OTHER_KEYS = frozenset(
    "architectures attn_implementation auto_map bos_token_id chat_template checkpointing chunk_size_feed_forward "
    "cls_token_id decoder_start_token_id dtype eos_token_id finetuning_task id2label is_decoder is_llama_config "
    "label2id mask_token_id max_window_layers model_name model_type name_or_path num_labels output_attentions "
    "output_hidden_states pad_token_id prefix problem_type quantization_config return_dict sep_token_id "
    "task_specific_params tf_legacy_loss tie_encoder_decoder tokenizer_class torch_dtype torchscript "
    "transformers.js_config transformers_version unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_cache "
    "use_return_dict "
    "bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size "
    "exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values "
    "repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p "
    f"{TRAINED_LENGTH}".split()
)
FIELDS = sorted(
    {*ARCHITECTURE, *POSITIVE, *FIXED, "initializer_range", "layer_types", "rope_scaling", "rope_theta"}
)
YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
# Keys of rope_parameters (older name: rope_scaling) that each rope_type reads in addition to rope_type and rope_theta.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", *YARN_OPTIONS),
}
ROPE_KEYS = frozenset("rope_type type rope_theta partial_rotary_factor".split())
# difflib similarity ratio from which an unknown key counts as a misspelt field: 0.7 finds num_layers and hidden_dim.
MISSPELT = 0.7


class JsonError(UserError, ValueError):
    """An error raised when a JSON file written by the user is invalid.

    `key` is the duplicate key, or the path of the file for all other errors.
    """

    code = "json"


class ModelConfigError(UserError, ValueError):
    """An error raised when a model configuration is invalid or unsupported.

    `key` is the field of config.json if a field is invalid, otherwise the path of the file.
    """

    code = "model_config"


def read_json_file(path: Path) -> Any:
    """Read a JSON file written by a user.

    Raises JsonError if the file cannot be read or is not valid JSON, an object has a duplicate key, or a number is NaN
    or Infinity.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:  # json keeps the last one silently
            raise JsonError(
                f"{path}: a JSON object contains these keys more than once: {', '.join(twice)}. Keep one entry "
                "for each key",
                code="duplicate_key",
                key=twice[0],
            )
        return dict(pairs)

    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is not a valid JSON number; use a finite number")

    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
        return json.loads(text, object_pairs_hook=unique, parse_constant=no_constant)
    except JsonError:
        raise
    except (OSError, ValueError) as error:
        reason = "only JSON is supported, not YAML" if path.suffix in (".yaml", ".yml") else error
        message = f"{path} cannot be read as JSON: {reason}"
        raise JsonError(message, code="not_json", key=str(path)) from error


def config_file(name_or_path: str) -> Path:
    """Return the path of a model's JSON configuration without reading the file.

    Args:
        name_or_path: the name of a file in model/configs without .json, the path of a JSON file, or a folder that
            contains config.json.

    Raises ModelConfigError if the file does not exist.
    """
    path = Path(name_or_path)
    if not path.exists():
        path = CONFIGS / f"{name_or_path}.json"
    if path.is_dir():
        path = path / "config.json"
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in CONFIGS.glob("*.json")))
        raise ModelConfigError(
            f"model.config: {name_or_path!r} does not exist. Pass the path of a JSON file, a folder that contains "
            f"config.json (such as a run's hf folder), or the name of a built-in configuration: {names}",
            code="not_found",
            key=name_or_path,
        )
    return path


def model_name(name_or_path: str | Path) -> str:
    """Return a short display name for a model: the last part of its path, or RUN/hf for a run's export."""
    path = Path(name_or_path)
    return f"{path.parent.name}/{path.name}" if path.name == "hf" and path.parent.name else path.name


def load_config(name_or_path: str) -> MistralConfig:
    """Load and check a model configuration, and return a MistralConfig, LlamaConfig or Qwen3Config.

    Args:
        name_or_path: name of a file in model/configs, path of a JSON file, or path of a folder with a config.json.

    Raises:
        ModelConfigError: If the file does not exist or is not valid JSON, the model type is not supported, a key is
            unknown (transformers would ignore it) or contradicts another key, or a value has the wrong type, is out of
            range or is not supported.
    """
    path = config_file(name_or_path)
    values = _read_file(path)
    try:
        config = make_config(values)
    except Exception as error:  # transformers raises its own exceptions for wrong types
        raise ModelConfigError(f"model.config: {path}: {' '.join(str(error).split())}") from error
    # this key describes stored weights, not the architecture, and does not apply to a model trained from scratch
    vars(config).pop("quantization_config", None)
    check_config(config, f"{path}: ")
    return config


def make_config(values: dict[str, Any]) -> MistralConfig:
    """Create a MistralConfig, LlamaConfig or Qwen3Config from the keys of a config.json, depending on its model_type.

    `sliding_window` is set to None on a LlamaConfig, so that all other code can treat Llama as Mistral without a
    sliding window.
    """
    from transformers import CONFIG_MAPPING

    config: Any = CONFIG_MAPPING[values.get("model_type", "mistral")].from_dict(values)
    config.sliding_window = getattr(config, WINDOW, None)
    return config


def load_sizes(name_or_path: str) -> Any:
    """Load the sizes in a model configuration, without importing transformers if possible.

    If the file has no RoPE scaling and contains every key of ARCHITECTURE (except for the optional keys in
    MODEL_TYPES), this function returns a namespace with the keys of the file as attributes. For all other files, this
    function returns the result of `load_config`.

    Raises ModelConfigError for the same reasons as `load_config`.
    """
    path = config_file(name_or_path)
    values = _read_file(path)
    optional = MODEL_TYPES[values["model_type"]]
    kinds: dict[str, tuple[type, ...]] = {
        **dict.fromkeys(POSITIVE, (int,)),
        **dict.fromkeys([WINDOW, *optional], (int, NoneType)),
        "rms_norm_eps": (float,),
        "tie_word_embeddings": (bool,),
    }
    values = dict.fromkeys(optional) | values
    rope = values.get("rope_parameters")
    has_theta = (
        "rope_theta" in values if rope is None else isinstance(rope, dict) and ROPE_KEYS >= rope.keys()
    )
    is_whole = all(type(values.get(key, ...)) in kind for key, kind in kinds.items())
    if values.get("rope_scaling") or not (has_theta and is_whole):
        return load_config(name_or_path)
    config: Any = SimpleNamespace(**values)
    check_config(config, f"{path}: ")
    return config


def numeric_settings(config: MistralConfig) -> dict[str, Any]:
    """Return the configuration values that can affect training results. The path and library version are excluded."""
    others = ("max_position_embeddings", "initializer_range", "hidden_act", "bos_token_id", "eos_token_id")
    # a missing model_type means mistral
    kind = () if config.model_type == "mistral" else ("model_type",)
    return {key: getattr(config, key, None) for key in (*ARCHITECTURE, *others, *kind)}


def _read_file(path: Path) -> dict[str, Any]:
    """Read a config.json file.

    Raises ModelConfigError if the file is not valid JSON, the model type is not supported, a key is unknown or
    contradicts another key, or a size is too small.
    """
    try:
        values = read_json_file(path)
    except JsonError as error:
        raise ModelConfigError(f"model.config: {error}", code=error.code, key=error.key) from error
    if not isinstance(values, dict):
        message = f"model.config: {path} must contain a JSON object"
        raise ModelConfigError(message, code="not_an_object", key=str(path))
    if (kind := values.get("model_type")) not in tuple(MODEL_TYPES):
        raise ModelConfigError(
            f"model.config: {path} has model_type {kind!r} (None means that the key is missing), which is not "
            f"supported. Use a model of one of these types: {', '.join(MODEL_TYPES)}",
            key="model_type",
        )
    _refuse(
        f"model.config: {path}: ",
        {
            key: f"{key} is {values[key]}; set it to {least} or more{', or to null' if key == WINDOW else ''}"
            for key, least in {**dict.fromkeys(POSITIVE, 1), WINDOW: 2}.items()
            if isinstance(values.get(key), int) and values[key] < least
        }
        | _key_problems(values),
    )
    return values


def _refuse(start: str, problems: dict[str, str]) -> None:
    """Raise ModelConfigError with all messages in `problems`, if there are any.

    Args:
        start: prefix of the error message.
        problems: one message for each affected key of config.json.
    """
    if problems:
        raise ModelConfigError(start + "; ".join(problems.values()), key=next(iter(problems)))


def _key_problems(values: dict[str, Any]) -> dict[str, str]:
    """Return an error message for each key of a config.json that is not known or contradicts another key.

    transformers would silently ignore these keys.
    """
    problems = {}
    for key in values:
        if key not in FIELDS and key not in OTHER_KEYS and not key.startswith("_"):
            close = difflib.get_close_matches(key, FIELDS, 1, MISSPELT)
            problems[key] = (
                f"{key}: unknown key (did you mean {close[0]}?)"
                if close
                else f"{key}: unknown key. If the model does not need this key, remove it. Otherwise, use another model"
            )
    ropes = {
        key: values[key] for key in ("rope_parameters", "rope_scaling") if isinstance(values.get(key), dict)
    }
    theta = values.get("rope_theta")
    for name, rope in ropes.items():
        if theta is not None and (other := rope.get("rope_theta", theta)) != theta:
            problems["rope_theta"] = (
                f"rope_theta is {theta}, but {name} contains rope_theta {other}; remove one of them, or set both to "
                "the same value"
            )
        if (kind := _rope_type(rope)) not in ROPE_TYPES:
            continue
        if unknown := ", ".join(sorted(rope.keys() - ROPE_KEYS - {*ROPE_TYPES[kind]})):
            read = ", ".join(("rope_type", "rope_theta", *ROPE_TYPES[kind]))
            problems[name] = (
                f"{name} contains {unknown}, but rope_type {kind} reads only {read}; remove {unknown}"
            )
    if values["model_type"] != "mistral" and values.get(WINDOW):
        problems[WINDOW] = (
            f"{WINDOW} is {values[WINDOW]}, but {values['model_type']} models have no sliding window; set {WINDOW} to "
            "null"
        )
    both = [_rope_scaling(rope) for rope in ropes.values() if rope]
    if both[1:] and both[0] != both[1]:
        problems["rope_scaling"] = (
            f"rope_scaling {both[1]} differs from rope_parameters {both[0]}; remove one of them, or set both to the "
            "same values"
        )
    return problems


def check_config(config: MistralConfig, where: str = "") -> None:
    """Raise ModelConfigError if this model implementation does not support `config`.

    Args:
        where: prefix of the error message.
    """
    problems = {
        key: f"{key} is {json.dumps(value)}, but only {json.dumps(only)} is supported"
        for key, only in FIXED.items()
        if (value := getattr(config, key, only)) not in (only, None)
    }
    layer_types = getattr(config, "layer_types", None) or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        problems["layer_types"] = f"layer_types is {layer_types}, but only full_attention is supported"
    if config.num_attention_heads % config.num_key_value_heads:
        problems["num_attention_heads"] = (
            f"num_attention_heads is {config.num_attention_heads}, but must be a multiple of num_key_value_heads "
            f"({config.num_key_value_heads})"
        )
    pad = getattr(config, "pad_token_id", None)
    if pad is not None and not -config.vocab_size <= pad < config.vocab_size:
        problems["pad_token_id"] = (
            f"pad_token_id is {pad}, which is outside the vocabulary of {config.vocab_size} tokens. Training does not "
            "use padding, so set pad_token_id to null"
        )
    if head_dim(config) % 8:
        problems["head_dim"] = f"head_dim is {head_dim(config)}, but must be a multiple of 8"
    _refuse(f"model.config: {where}", problems | _rope_problems(rope_parameters(config)))


def _rope_problems(rope: dict[str, Any]) -> dict[str, str]:
    """Return an error message for each invalid value in `rope`, keyed by configuration key. See `rope_parameters`."""
    if (kind := rope["rope_type"]) not in ROPE_TYPES:
        return {"rope_type": f"rope_type {kind!r} is not supported; use one of {', '.join(ROPE_TYPES)}"}
    problems = {}
    for key in ("rope_theta", *ROPE_TYPES[kind]):
        if key == "truncate":
            continue
        value: Any = rope.get(key, 1.0 if key in YARN_OPTIONS else None)
        if type(value) not in (int, float) or not 0 < value < math.inf or (key == "factor" and value < 1):
            least = "of at least 1" if key == "factor" else "greater than 0"
            problems[key] = f"{key} is {value!r}, but rope_type {kind} requires a finite number {least}"
    if kind == "llama3" and not problems and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        problems["low_freq_factor"] = (
            f"low_freq_factor is {rope['low_freq_factor']}, but must be lower than high_freq_factor "
            f"({rope['high_freq_factor']})"
        )
    if rope.get("partial_rotary_factor", 1) != 1:
        problems["partial_rotary_factor"] = (
            f"partial_rotary_factor is {rope['partial_rotary_factor']}, but only 1 is supported"
        )
    return problems


def rope_parameters(config: MistralConfig) -> dict[str, Any]:
    """Return rope_theta, rope_type and the RoPE scaling keys in one dictionary.

    Older config.json files store these keys under other names and in several places.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    return {**_rope_scaling(rope), "rope_theta": theta}


def rope_frequencies(config: MistralConfig, device: torch.device | None = None) -> tuple[torch.Tensor, float]:
    """Return the RoPE frequencies, float32 [D / 2] for head dimension D, and the attention factor.

    As in transformers, rotated queries and keys are multiplied by the attention factor. The factor is 1 for all RoPE
    types except yarn.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_parameters(config)
    if rope["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device)
    D = head_dim(config)
    exponents = torch.arange(0, D, 2, dtype=torch.float32, device=device) / D
    return 1.0 / float(rope["rope_theta"]) ** exponents, 1.0


def _rope_scaling(rope: dict[str, Any]) -> dict[str, Any]:
    """Return rope_type and the RoPE scaling keys of `rope`, without rope_theta."""
    given = {
        key: value for key, value in rope.items() if key not in ("type", "rope_theta") and value is not None
    }
    return given | {"rope_type": _rope_type(rope)}


def _rope_type(rope: dict[str, Any]) -> str:
    return rope.get("rope_type") or rope.get("type") or "default"  # "type" is the older name


def head_dim(config: MistralConfig) -> int:
    return config.head_dim or config.hidden_size // config.num_attention_heads


def has_qk_norm(config: MistralConfig) -> bool:
    """Return whether the heads of queries and keys pass an RMSNorm before RoPE, as in Qwen3 (arXiv:2505.09388)."""
    return config.model_type == "qwen3"


def trained_length(config: MistralConfig) -> int | None:
    """Return the sequence length that an exported model was trained with, or None if unknown.

    The result is at most max_position_embeddings.
    """
    length = getattr(config, TRAINED_LENGTH, None)
    return min(length, config.max_position_embeddings) if isinstance(length, int) and length > 1 else None


def window_size(config: MistralConfig) -> tuple[int, int]:
    """Return the sliding window in Transformer Engine's format.

    The format is (left, right): how many tokens before and after itself each token can attend to.

    With Hugging Face's sliding_window W, a token attends to itself and the W - 1 tokens before it: (W - 1, 0). Without
    a window, the result is (-1, 0), where -1 means unlimited.
    """
    return (config.sliding_window - 1, 0) if config.sliding_window else (-1, 0)


def softmax_scale(config: MistralConfig) -> float | None:
    """Return the softmax scale of attention, or None for the default 1 / sqrt(D) with head dimension D.

    With yarn, the scale includes the attention factor from `rope_frequencies` twice, once for queries and once for
    keys. The model therefore does not multiply queries and keys by this factor.
    """
    factor = rope_frequencies(config)[1]
    return None if factor == 1 else factor**2 / math.sqrt(head_dim(config))


def layer_matrix_parameters(config: MistralConfig) -> int:
    """Return the number of parameters in the weight matrices of the decoder layers. The Muon optimizer updates these
    matrices.
    """
    return sum(math.prod(shape) for name, shape in weight_shapes(config).items() if "_proj." in name)


def weight_shapes(config: MistralConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each model weight, keyed by Hugging Face tensor name. Tied embeddings appear once, as
    embed_tokens.
    """
    H, I, D = config.hidden_size, config.intermediate_size, head_dim(config)  # noqa: E741
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    norms: dict[str, tuple[int, ...]] = {"self_attn.q_norm": (D,), "self_attn.k_norm": (D,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, H)}
    for index in range(config.num_hidden_layers):
        layer = {
            "input_layernorm": (H,),
            "self_attn.q_proj": (q, H),
            "self_attn.k_proj": (kv, H),
            "self_attn.v_proj": (kv, H),
            "self_attn.o_proj": (H, q),
            **(norms if has_qk_norm(config) else {}),
            "post_attention_layernorm": (H,),
            "mlp.gate_proj": (I, H),
            "mlp.up_proj": (I, H),
            "mlp.down_proj": (H, I),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (H,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, H)
    return shapes


def num_parameters(config: MistralConfig) -> int:
    """Return the number of model parameters. Tied embeddings are counted once."""
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def attention_pairs(config: MistralConfig, seq_length: int) -> float:
    """Return the mean number of tokens that each token attends to, including itself.

    Follows the usual convention for FLOP counts: T / 2 for a causal sequence of T tokens, and W - W^2 / (2 T) with a
    sliding window of W < T tokens.
    """
    window = min(config.sliding_window or seq_length, seq_length)
    return window - window**2 / (2 * seq_length)


def flops_per_token(config: MistralConfig, seq_length: int) -> float:
    """Return the floating-point operations per token of one forward and backward pass over sequences of `seq_length`
    tokens.

    Counts 6 operations per matmul weight, and 12 * N * D per layer and attended token (N query heads of dimension D).
    Recomputation is not counted. Sources: Kaplan et al. 2020, and appendix B of Chowdhery et al. 2022, counting only
    the causal half of attention.
    """
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * head_dim(config)
    # the weights in matrix products: all except the embedding and the norms
    weights = layer_matrix_parameters(config) + config.vocab_size * config.hidden_size
    return 6 * weights + attention * attention_pairs(config, seq_length)


def state_parts_gib(
    config: MistralConfig,
    zero_stage: int,
    world_size: int,
    compute: str = "bf16",
    float32_gradients: bool | None = None,
    optimizer_bytes: float | None = None,
    optim: str = "adamw",
    offloads: bool = False,
) -> dict[str, float]:
    """Estimate the GPU memory in GiB that weights, gradients and optimizer states need on each rank.

    Source: Rajbhandari et al. 2020, table 1.

    Activations, communication buckets and FP8 copies of weights are excluded. train/planning/memory.py adds their
    memory.

    Args:
        compute: the value of precision.compute. fp32 needs 4 bytes per parameter for weights, 4 for gradients and 8 for
            optimizer moments. Other values need 2 bytes for weights, 2 for gradients, and 12 for float32 master weights
            and moments. FP8 layers keep bf16 weights.
        float32_gradients: whether gradients are accumulated in 4 bytes per parameter. None means true for ZeRO 1 to 3
            and false for ZeRO 0, as in the shipped DeepSpeed configuration.
        optimizer_bytes: bytes of optimizer state per parameter (PrecisionConfig.optimizer_bytes). None uses the values
            above.
        optim: the optimizer. AdamW stores two moments per parameter. Muon stores only one for layer matrices.
        offloads: whether DeepSpeed keeps the optimizer states, and with ZeRO 3 also the gradients, in host memory.
    """
    if compute == "fp32":
        weight, gradient, optimizer = 4, 4, 8
    else:
        in_float32 = zero_stage >= 1 if float32_gradients is None else float32_gradients
        weight, gradient, optimizer = 2, 4 if in_float32 else 2, 12
    parameters = num_parameters(config) / GIB
    if offloads:
        gradient, optimizer, optimizer_bytes = 0 if zero_stage == 3 else gradient, 0, 0
    of_optimizer = parameters * (optimizer_bytes or optimizer) - (
        4 * layer_matrix_parameters(config) / GIB if optim == "muon" else 0
    )
    return {
        "weights": parameters * weight / (world_size if zero_stage >= 3 else 1),
        "gradients": parameters * gradient / (world_size if zero_stage >= 2 else 1),
        "optimizer": of_optimizer / (world_size if zero_stage >= 1 else 1),
    }
