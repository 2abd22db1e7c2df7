"""What a run is set to: every field with its default, what it may be, and the presets."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from dataclasses import dataclass, field
from functools import cache

from lowprec import UserError
from lowprec.training import galore
from lowprec.training.eight import recipe_of
from lowprec.training.model import GPTConfig


@dataclass(frozen=True)
class TrainConfig:
    """One run. Defaults are the 12-layer GPT-2 of the first recorded campaign."""

    policy: str = "FA2"
    """attention's rounding sites, e.g. LOW or LOW+delta_from=o_fp32"""
    layers: dict[str, str] = field(default_factory=dict)
    """policies of single layers or heads, e.g. 1 LOW or 1/0,6,7 LOW or */0 LOW"""
    seed: int = 0
    """seeds the weights and the data order"""
    data_seed: int | None = None
    """seeds the data order; None is seed"""
    data: str = "shards/pysource"
    """a token shard or a folder of shards, see `lowprec data prepare`"""
    steps: int = 6500
    """updates of the weights"""
    stop_after_explosion: int | None = 1000
    """steps to go on after the onset of a confirmed explosion; None never stops"""
    batch_size: int = 32
    """sequences a step, over all processes"""
    micro_batch: int | None = None
    """sequences a process has in memory at once; None is its whole share"""
    block_size: int = 1024
    """tokens of a sequence"""
    n_layer: int = 12
    """layers"""
    n_head: int = 12
    """heads of a layer"""
    n_embd: int = 768
    """width of the model"""
    lr: float = 2e-3
    """learning rate after the warm-up"""
    warmup: int = 1000
    """steps of linear warm-up"""
    lr_end: float | None = None
    """where a cosine ends at step lr_steps; None keeps the rate constant after the warm-up"""
    lr_steps: int = 600_000
    """the last step of the cosine"""
    beta1: float = 0.9
    """decay of Adam's mean of gradients"""
    beta2: float = 0.95
    """decay of Adam's mean of squares"""
    eps: float = 1e-8
    """what Adam adds to the root of that"""
    weight_decay: float = 0.0
    """of AdamW, on all weights"""
    clip: float = 1.0
    """largest global gradient norm"""
    qk_norm: bool = False
    """RMS norm of queries and keys"""
    center_keys: bool = False
    """subtract the mean key, which the softmax does not see"""
    gate: bool = False
    """a sigmoid gate on the attention output"""
    logit_softcap: float = 0.0
    """c of c tanh(logits / c) on the output logits; 0 is off"""
    positions: str = "learned"
    """learned, rotary or none"""
    rotary_share: float = 1.0
    """share of a head's channels that rotary positions turn"""
    rotary_base: float = 10000.0
    """of the angles of rotary positions"""
    rotary: str = "FP32"
    """where rotary positions round, e.g. CODE or FP32+cs=bf16, see `lowprec.numerics.rotation`"""
    unrotated_layers: tuple[int, ...] = ()
    """layers without positions among rotary ones"""
    norm: str = "layer"
    """layer or rms"""
    mlp: str = "gelu"
    """gelu or swiglu"""
    mlp_hidden: int | None = None
    """width of the MLP; None is 4 n_embd, with swiglu 8/3 n_embd up to a multiple of 64"""
    n_kv_head: int | None = None
    """heads of keys and values, which the heads of queries share evenly; None is n_head"""
    impl: str = "auto"
    """who computes attention, one of `lowprec.attention.IMPLS`; auto is triton on GPUs"""
    tile: int | None = None
    """keys of a rounding block; None is the whole row"""
    probe_every: int = 50
    """steps between probes"""
    checkpoint_every: int = 0
    """steps between checkpoints, from which an unfinished run goes on; 0 is never"""
    capture_at: tuple[int, ...] = ()
    """steps before which a layer is captured"""
    capture_every: int = 0
    """capture every so many steps, and keep the last capture_keep if the run explodes; 0 is off"""
    capture_keep: int = 4
    """captures that capture_every keeps"""
    capture_layer: int | None = None
    """the layer to capture; None takes the one with the largest error of W_Q's gradient"""
    capture_heads: tuple[int, ...] = ()
    """its heads; without it the one with the largest error"""
    window: tuple[int, int] | None = None
    """steps FIRST LAST in which the error of W_Q's gradient is measured at every step"""
    weights_at: tuple[int, ...] = ()
    """steps before which all weights are kept, in the run's .weights folder; `steps` is the end"""
    device: str = "auto"
    """cuda, cpu; auto is a GPU if there is one"""
    compile: bool | None = None
    """torch.compile everything but attention; None means on CUDA, without a recipe"""
    amp: bool | str | None = None
    """BF16 autocast outside attention, over FP32 weights; None means on CUDA; fp16 is FP16 autocast
    with a loss scale, which skips the steps whose gradient (grad_norm) is not finite"""

    recipe: str = "FP32"
    """casts of all products outside attention, of all gradients and weights with two dimensions, as
    FP32+x=e5m2; it needs amp=False"""
    loss_scale: str | None = None
    """a loss scale, as 2^13 or dynamic,every2000,least2^7@0; a step whose gradient is not finite is
    skipped; None scales nothing and skips nothing"""
    spurious: int = 0
    """steps between two overflows that are put in, with a loss_scale; 0 puts in none"""
    optimizer: str = "adamw"
    """adamw, or galore,rank96,every200,scale0.25: matrices have AdamW's step of their gradient's
    first 96 singular directions, chosen every 200 steps, times 0.25"""

    def __post_init__(self):
        kinds = _kinds()
        for one in dataclasses.fields(self):
            if not is_a(value := getattr(self, one.name), kinds[one.name]):
                words = " or ".join(WORDS.get(kind, kind) for kind in one.type.split(" | "))
                text = isinstance(value, str) and "float" in one.type
                hint = "; write it as 2.0e-3, not as a text" if text else ""
                raise UserError(f"{one.name}={value!r} must be {words}{hint}")
        self.model()  # raises for what no model can have
        for names, allowed, words in RANGES:
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not allowed(value):
                    raise UserError(f"{name}={value} must be {words}")
        if isinstance(self.amp, str) and self.amp != "fp16":
            raise UserError(f"amp={self.amp!r} must be True (BF16), fp16, False or None")
        if any(not 0 <= step <= self.steps for step in self.weights_at):
            raise UserError(f"weights_at={self.weights_at} must be steps up to steps={self.steps}")
        if self.lr_end is not None and self.lr_steps <= self.warmup:
            raise UserError(
                f"lr_steps={self.lr_steps} must be above warmup={self.warmup}: there the cosine "
                "begins"
            )
        recipe_of(self)  # raises for what no run can cast
        galore.require(self)
        self._check_captures()

    def _check_captures(self):
        """What would otherwise fail, or do nothing, at some late step."""
        if any(not 0 <= step < self.steps for step in self.capture_at):
            raise UserError(f"capture_at={self.capture_at} must be steps below steps={self.steps}")
        if not 0 <= (self.capture_layer or 0) < self.n_layer:
            raise UserError(f"capture_layer={self.capture_layer} is none of {self.n_layer} layers")
        if any(not 0 <= head < self.n_head for head in self.capture_heads):
            raise UserError(f"capture_heads={self.capture_heads} must be below {self.n_head}")
        layers = range(self.n_layer) if self.capture_layer is None else [self.capture_layer]
        for layer in layers if self.capture_heads else ():
            groups = self.model().groups(layer)
            if not any(set(self.capture_heads) <= set(heads) for _, heads in groups):
                raise UserError(
                    f"capture_heads={self.capture_heads} have several policies in layer {layer}; "
                    "take heads that share one, and with capture_layer a layer where they do"
                )
        if self.window is not None:
            first, last = self.window
            if not 0 <= first <= last < self.steps:
                raise UserError(
                    f"window={self.window} must be a first and a last step below {self.steps}"
                )
            if self.checkpoint_every:
                raise UserError("a window is one uninterrupted run; set checkpoint_every=0")
        looks_inside = self.capture_at or self.capture_every or self.window
        if self.impl.startswith("sdpa") and looks_inside:
            raise UserError(
                f"captures and windows need the numbers inside attention, which impl={self.impl!r} "
                "does not show; take impl='auto', or set none of capture_at, capture_every, window"
            )
        if self.amp == "fp16" and looks_inside:
            raise UserError("captures and windows are of BF16 or FP32 runs; set amp=True or False")

    @classmethod
    def usual(cls) -> dict:
        """The default of each field as run.json has it: what runs did that do not know it."""
        return json.loads(json.dumps(dataclasses.asdict(cls())))

    def check_processes(self, count: int):
        """Raise `UserError` if so many processes cannot train this together."""
        if self.batch_size % count:
            raise UserError(f"batch_size={self.batch_size} cannot be shared by {count} processes")
        if count > 1 and (self.capture_at or self.capture_every or self.window):
            raise UserError(f"captures and windows are made by one process, and not by {count}")

    def model(self) -> GPTConfig:
        names = {f.name for f in dataclasses.fields(GPTConfig)} & set(vars(self))
        return GPTConfig(**{name: getattr(self, name) for name in names})


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then constant or a cosine down to lr_end."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    if config.lr_end is None:
        return config.lr
    done = min(1.0, (step - config.warmup) / max(config.lr_steps - config.warmup, 1))
    return config.lr_end + 0.5 * (config.lr - config.lr_end) * (1 + math.cos(math.pi * done))


RANGES = (
    ("steps batch_size micro_batch probe_every lr_steps tile capture_keep",
     lambda x: x >= 1, "at least 1"),
    ("warmup checkpoint_every capture_every stop_after_explosion spurious",
     lambda x: x >= 0, "0 or more"),
    ("lr lr_end eps weight_decay logit_softcap",
     lambda x: 0 <= x < math.inf, "0 or more, and finite"),
    ("beta1 beta2", lambda x: 0 <= x < 1, "at least 0 and below 1"),
    ("clip", lambda x: x > 0, "above 0; inf clips nothing"),
    ("seed data_seed", lambda x: 0 <= x < 2**63, "from 0 to 2^63 - 1"),
)  # fmt: skip
"""Fields of `TrainConfig`, what they may be, and that in words; None is left to its type."""

WORDS = {
    "str": "a text", "int": "a whole number", "float": "a number", "bool": "True or False",
    "dict[str, str]": "policies by layer, as {1: LOW}", "tuple[int, int]": "two steps, as [2, 5]",
    "tuple[int, ...]": "a list of whole numbers, as [2, 5]",
}  # fmt: skip


@cache
def _kinds() -> dict:
    """The type of each field."""
    return typing.get_type_hints(TrainConfig)


def is_a(value, kind) -> bool:
    """Whether a value, from a command line, YAML or JSON, has the type that a field declares."""
    inner = typing.get_args(kind)
    if typing.get_origin(kind) is dict:
        return isinstance(value, dict) and all(is_a(v, inner[1]) for v in value.values())
    if typing.get_origin(kind) is tuple:
        fits = isinstance(value, list | tuple) and (inner[-1] is ... or len(value) == len(inner))
        return fits and all(is_a(v, inner[0]) for v in value)
    if inner:
        return any(is_a(value, one) for one in inner)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


LLAMA = dict(positions="rotary", norm="rms", mlp="swiglu")
"""What makes a Llama of a preset of GPT-2, at nearly the same number of weights."""

PRESETS = {
    "gpt2": TrainConfig(),
    "gpt2-paper": TrainConfig(
        batch_size=512, micro_batch=64, lr=1e-3, lr_end=1e-5, warmup=2000, steps=8000
    ),
    "mini": TrainConfig(n_layer=6, n_head=6, n_embd=384, warmup=500, steps=4000),
    "tiny": TrainConfig(
        n_layer=2, n_head=2, n_embd=64, block_size=64, batch_size=4, steps=100, warmup=20,
        probe_every=10, data="data/corpora/smoke.safetensors",
    ),
    "gpt2-llama": TrainConfig(**LLAMA),
    "mini-llama": TrainConfig(n_layer=6, n_head=6, n_embd=384, warmup=500, steps=4000, **LLAMA),
}  # fmt: skip
