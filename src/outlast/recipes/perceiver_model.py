"""Defines Perceiver IO for clips: it encodes 16 frames, 0.64 s of audio and a label as 784 latents, and reconstructs them.

The model is that of Jaegle et al., "Perceiver IO: A General Architecture for Structured Inputs & Outputs", section 4.3
(https://arxiv.org/abs/2107.14795), by default with the sizes of deepmind/multimodal-perceiver. With the weights of
deepmind/multimodal-perceiver (see `imported`), the outputs equal those of Hugging Face's `PerceiverForMultimodalAutoencoding`,
but less is computed: position encodings are computed once, the keys and values of the 52,097 inputs are never projected (see
`Attention.folded`), and only queried points are decoded.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outlast.base.errors import OutlastError
from outlast.recipes.shared import results

AUDIO, IMAGE, LABEL = "audio", "image", "label"  # modalities, in the order in which inputs and queries are concatenated
EPSILON = 1e-5  # of layer norms


@dataclasses.dataclass(frozen=True)
class Config:
    """A model's sizes, by default those of deepmind/multimodal-perceiver."""

    frames: int = 16
    image_size: int = 224  # a frame's side in pixels
    audio_per_frame: int = 1920  # audio samples per frame
    classes: int = 700
    num_latents: int = 784
    d_latents: int = 512
    num_blocks: int = 1  # number of times that all self-attention layers are applied, with the same weights
    num_self_attends: int = 8
    num_heads: int = 8
    num_cross_heads: int = 1
    widening: int = 1  # hidden units of an MLP, as a multiple of its width
    d_output: int = 512  # width of the decoder's output, before the last three layers
    patch: int = 4  # a patch's side in pixels
    samples_per_patch: int = 16
    image_bands: int = 32  # frequencies of the position encodings, per dimension
    audio_bands: int = 192
    label_channels: int = 1024  # width of the label's query
    dropout: float = 0.1  # probability of dropping an attention weight in training

    @property
    def samples(self) -> int:
        """Number of audio samples in a clip."""
        return self.frames * self.audio_per_frame

    @property
    def audio_points(self) -> int:
        """Number of audio patches in a clip."""
        return self.samples // self.samples_per_patch

    @property
    def image_points(self) -> int:
        """Number of pixels in a clip."""
        return self.frames * self.image_size**2

    @property
    def channels(self) -> dict[str, int]:
        """Number of channels of an input before padding, keyed by modality."""
        return {
            AUDIO: self.samples_per_patch + 1 + 2 * self.audio_bands,
            IMAGE: 3 * self.patch**2 + 3 + 6 * self.image_bands,
            LABEL: self.classes,
        }

    @property
    def queried(self) -> dict[str, int]:
        """Number of channels of a query before padding, keyed by modality."""
        return {AUDIO: 1 + 2 * self.audio_bands, IMAGE: 3 + 6 * self.image_bands, LABEL: self.label_channels}

    @property
    def d_model(self) -> int:
        """Width of an input after padding, which is 704 for 700 classes."""
        return max(self.channels.values()) + 4

    @property
    def d_query(self) -> int:
        """Width of a query after padding."""
        return max(self.queried.values()) + 2

    def check(self) -> None:
        """Raise OutlastError for inconsistent sizes."""
        divided = [
            ("image_size", self.image_size, "patch", self.patch),
            ("samples of a clip", self.samples, "samples_per_patch", self.samples_per_patch),
            ("d_latents", self.d_latents, "num_heads", self.num_heads),
            ("d_model", self.d_model, "num_cross_heads", self.num_cross_heads),
        ]
        for whole, size, part, count in divided:
            if size % count:
                raise OutlastError(f"{whole} ({size}) is not divisible by {part} ({count}); change one of them")


_TINY = {"num_latents": 32, "d_latents": 64, "num_self_attends": 2, "num_heads": 4, "d_output": 64, "label_channels": 64}
SIZES: dict[str, dict[str, int]] = {  # keyed by the value of --size; base has the paper's sizes
    "tiny": _TINY | {"frames": 4, "image_size": 32, "samples_per_patch": 64, "image_bands": 8, "audio_bands": 32},
    "small": {"image_size": 64, "num_latents": 128, "d_latents": 256, "num_self_attends": 4, "d_output": 256},
    "base": {},
}


class Attention(nn.Module):
    """Attention over `d_kv` channels, from queries of width `d_q` to inputs of width `d_kv` (`cross`) or to the queries."""

    def __init__(self, d_q: int, d_kv: int, heads: int, dropout: float, *, cross: bool) -> None:
        super().__init__()
        self.heads, self.p = heads, dropout
        self.norm_q = nn.LayerNorm(d_q, EPSILON)
        self.norm_kv = nn.LayerNorm(d_kv, EPSILON) if cross else None
        self.query, self.key, self.value = nn.Linear(d_q, d_kv), nn.Linear(d_kv, d_kv), nn.Linear(d_kv, d_kv)
        self.out = nn.Linear(d_kv, d_q)

    @property
    def dropout(self) -> float:
        """Dropout probability, which is 0 in evaluation."""
        return self.p if self.training else 0.0

    def split(self, x: Tensor) -> Tensor:  # (b, n, c)
        """Divide the channels among the heads. Returns (b, h, n, c / h)."""
        return cast(Tensor, x.unflatten(-1, (self.heads, -1)).transpose(-3, -2))

    def forward(self, x: Tensor, inputs: Tensor | None = None) -> Tensor:
        """Return the outputs (b, n, d_q). `x` is (b, n, d_q), or (1, n, d_q) if all clips share it; `inputs` is (b, m, d_kv)."""
        x = self.norm_q(x)
        kv = x if inputs is None or self.norm_kv is None else self.norm_kv(inputs)
        q, k, v = (self.split(each) for each in (self.query(x), self.key(kv), self.value(kv)))
        q = q.expand(len(k), -1, -1, -1)
        y = attended(q, k, v, self.dropout, q.shape[-1] ** -0.5)  # (b, h, n, c / h)
        return cast(Tensor, self.out(y.transpose(1, 2).flatten(2)))

    def folded(self, x: Tensor, raw: Inputs) -> Tensor:
        """Compute `forward` without materializing the inputs (b, m, d_kv). The batch shares `x`, (n, d_q). Returns (b, n, d_q).

        The weight of input i is exp(q·k_i), where k_i = W (g * (x_i - mean_i) / std_i + b) + c. Because q·(W y) = (q W)·y, the
        queries are multiplied by W instead of all inputs. The channels that are constant within a modality, most of which are
        padding, are reduced to one channel per modality, so the paper's sizes give 408 channels instead of 704. Likewise, the
        inputs are averaged first, and only the average is multiplied by the weights of the values.
        """
        assert self.norm_kv is not None
        gain, shift = self.norm_kv.weight, self.norm_kv.bias  # (d_kv,)
        varying, constant = raw.varying, raw.constant  # channels; (b or 1, 3, d_kv - channels)
        q = self.query(self.norm_q(x)).unflatten(-1, (self.heads, -1)).transpose(0, 1)  # (h, n, c)
        w = self.key.weight.unflatten(0, (self.heads, -1))  # (h, c, d_kv)
        c = (self.key.weight @ shift + self.key.bias).unflatten(0, (self.heads, -1))  # (h, c)
        per_head = q.shape[-1]
        beta = q @ c[..., None]  # (h, n, 1)
        q = (q @ w) * gain  # (h, n, d_kv)
        seen = q[None, ..., :varying]  # (1, h, n, varying)
        rest = q[..., varying:] @ constant.mT[:, None]  # (b or 1, h, n, 3)
        folded = _joined(seen, rest, q.sum(-1, keepdim=True)[None], beta[None], raw.keys.shape[-1])
        on = q.device.type
        kind = torch.get_autocast_dtype(on) if torch.is_autocast_enabled(on) else raw.keys.dtype
        keys = raw.keys.to(kind)[:, None].expand(-1, self.heads, -1, -1)  # (b, h, m, k), converted once
        folded = folded.expand(len(keys), -1, -1, -1)  # (b, h, n, k)
        y = attended(folded, keys, keys, self.dropout, per_head**-0.5)  # (b, h, n, k)
        rest = y[..., varying : varying + 3] @ constant[:, None]  # (b, h, n, d_kv - varying)
        mean, whole = y[..., varying + 3, None], y[..., varying + 4, None]  # whole: 1 without dropout
        v = (torch.cat((y[..., :varying], rest), -1) + mean) * gain + shift * whole  # (b, h, n, d_kv)
        v = v @ self.value.weight.unflatten(0, (self.heads, -1)).mT + self.value.bias.unflatten(0, (self.heads, 1, -1)) * whole
        return cast(Tensor, self.out(v.transpose(1, 2).flatten(2)))


def attended(q: Tensor, k: Tensor, v: Tensor, dropout: float, scale: float) -> Tensor:
    """Return the output (b, h, n, c) of attention with queries (b, h, n, c), and keys and values (b, h, m, c).

    Training on a CPU uses plain matrix products in autocast's data type, because on a CPU torch's own attention computes in
    float32 if there is dropout, and has a slower backward pass if there is none.
    """
    if q.device.type != "cpu" or not torch.is_grad_enabled():
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=scale)
    weights = ((q * scale) @ k.mT).softmax(-1)  # (b, h, n, m)
    dropped = round(dropout * 2**16)
    if not dropped:
        return weights @ v
    # Draw 16 random bits per weight: torch would draw the numbers one after another, which takes longer than the products.
    bits = torch.empty(-(-weights.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    mask = torch.empty_like(weights, requires_grad=False)
    torch.ge(bits[: weights.numel()], dropped - 2**15, out=mask.view(-1))
    return ((weights * mask) @ v) * (2**16 / (2**16 - dropped))


class Inputs(NamedTuple):
    """A batch's normalized inputs, with the channels that are constant within a modality stored only once."""

    keys: Tensor
    """Each input's first `varying` channels, the one-hot vector of its modality, its negative mean, a one, and zeros that make
    k a multiple of 8. All but the one are divided by the standard deviation of the input's d_model channels. (b, m, k)."""
    varying: int
    constant: Tensor  # (b or 1, 3, d_model - varying): the other channels of each modality


def _joined(varying: Tensor, rest: Tensor, mean: Tensor, one: Tensor, width: int) -> Tensor:
    """Concatenate the parts along the last dimension in the order of `Inputs.keys`, and pad them with zeros to `width`."""
    lead = torch.broadcast_shapes(*(part.shape[:-1] for part in (varying, rest, mean, one)))
    parts = [part.expand(*lead, -1) for part in (varying, rest, mean, one)]
    return F.pad(torch.cat(parts, -1), (0, width - sum(part.shape[-1] for part in parts)))


class Layer(nn.Module):
    """Attention followed by an MLP. With `residual`, the queries are added to the attention's output."""

    def __init__(self, d_q: int, d_kv: int, heads: int, c: Config, *, cross: bool, residual: bool = True) -> None:
        super().__init__()
        self.residual = residual
        self.attention = Attention(d_q, d_kv, heads, c.dropout, cross=cross)
        self.norm = nn.LayerNorm(d_q, EPSILON)
        self.fc1, self.fc2 = nn.Linear(d_q, c.widening * d_q), nn.Linear(c.widening * d_q, d_q)

    def forward(self, x: Tensor, inputs: Tensor | Inputs | None = None) -> Tensor:
        y = self.attention.folded(x, inputs) if isinstance(inputs, Inputs) else self.attention(x, inputs)
        if self.residual:
            y = y + x
        return cast(Tensor, y + self.fc2(F.gelu(self.fc1(self.norm(y)))))


class Points(NamedTuple):
    """The points to decode in every clip of a batch."""

    image: Tensor  # (p,) int64: indices of pixels, frame by frame and row by row
    audio: Tensor  # (q,) int64: indices of audio patches


class Decoded(NamedTuple):
    """The reconstruction of a batch at its `Points`."""

    image: Tensor  # (b, p, 3), from 0 to 1
    audio: Tensor  # (b, q, samples_per_patch), from -1 to 1
    label: Tensor  # (b, classes) logits


class Perceiver(nn.Module):
    """A model that encodes clips as latents, and reconstructs points of the clips from these latents."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        config.check()
        self.config = c = config
        self.latents = nn.Parameter(torch.empty(c.num_latents, c.d_latents))
        self.padding = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(1, c.d_model - width)) for name, width in c.channels.items()}
        )
        self.hidden_label = nn.Parameter(torch.empty(1, c.d_model))  # the input in place of a hidden label
        self.encoder = Layer(c.d_latents, c.d_model, c.num_cross_heads, c, cross=True)
        self.self_attends = nn.ModuleList(
            Layer(c.d_latents, c.d_latents, c.num_heads, c, cross=False) for _ in range(c.num_self_attends)
        )
        self.label_query = nn.Parameter(torch.empty(1, c.label_channels))
        self.query_padding = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(1, c.d_query - width)) for name, width in c.queried.items()}
        )
        self.decoder = Layer(c.d_query, c.d_latents, 1, c, cross=True, residual=False)
        self.final = nn.Linear(c.d_query, c.d_output)
        widths = {AUDIO: c.samples_per_patch, IMAGE: 3, LABEL: c.classes}
        self.heads = nn.ModuleDict({name: nn.Linear(c.d_output, width) for name, width in widths.items()})
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("weight") and "norm" not in name:  # scaled by the input's width, as in the paper's code
                nn.init.trunc_normal_(parameter, std=parameter.shape[1] ** -0.5)
            elif "norm" not in name:
                nn.init.trunc_normal_(parameter, std=0.02)
        self._tables: dict[torch.device, dict[str, Tensor]] = {}

    def forward(self, video: Tensor, audio: Tensor, label: Tensor, hidden: Tensor, points: Points) -> Decoded:
        """Encode clips with `encode`, and reconstruct their points with `decode`."""
        return self.decode(self.encode(video, audio, label, hidden), points)

    def encode(self, video: Tensor, audio: Tensor, label: Tensor, hidden: Tensor) -> Tensor:
        """Return the latents (b, num_latents, d_latents) of clips. `hidden`, (b,) bool, selects the labels (b,) to hide.

        `video` is (b, t, h, w, 3), either uint8 or floating-point numbers from 0 to 1. `audio` is (b, samples), either int16 or
        floating-point numbers from -1 to 1.
        """
        inputs = self._inputs(pixels(video), sound(audio), label, hidden)
        x = self.encoder(self.latents, inputs)  # (b, n, c)
        for _ in range(self.config.num_blocks):
            for layer in self.self_attends:
                x = layer(x)
        return cast(Tensor, x)

    def decode(self, latents: Tensor, points: Points) -> Decoded:
        """Reconstruct the values at the points from latents (b, n, c)."""
        p, q = len(points.image), len(points.audio)
        y = self.final(self.decoder(self._queries(points)[None], latents))  # (b, q + p + 1, d_output): audio, image, label
        audio, image, label = y.split((q, p, 1), 1)
        return Decoded(self.heads[IMAGE](image), self.heads[AUDIO](audio), self.heads[LABEL](label)[:, 0])

    def _inputs(self, video: Tensor, audio: Tensor, label: Tensor, hidden: Tensor) -> Inputs:
        """Return all inputs, in float32. `video`: (b, t, h, w, 3); `audio`: (b, samples)."""
        c, b, tables = self.config, len(video), self._tables_on(video.device)
        varying = max(c.channels[AUDIO], c.channels[IMAGE])
        pad_audio, pad_image, pad_label = (self.padding[name][0] for name in (AUDIO, IMAGE, LABEL))
        one_hot = torch.cat((F.one_hot(label, c.classes).to(pad_label), pad_label.expand(b, -1)), -1)  # (b, d_model)
        token = torch.where(hidden[:, None], self.hidden_label, one_hot)  # (b, d_model)
        parts = (
            (audio.unflatten(1, (-1, c.samples_per_patch)), tables[AUDIO], pad_audio),  # (b, 1920, 16), (1920, 385), (303,)
            (patches(video, c.patch), tables[IMAGE], pad_image),  # (b, 50176, 48), (50176, 195), (461,)
            (token[:, None], None, None),  # (b, 1, 704)
        )
        width = -(-(varying + 5) // 8) * 8
        rows = []
        for number, (x, position, pad) in enumerate(parts):
            if position is not None and pad is not None:
                total = x.sum(-1, keepdim=True) + position.sum(-1, keepdim=True) + pad.sum()  # (b, m, 1)
                squares = x.square().sum(-1, keepdim=True) + position.square().sum(-1, keepdim=True) + pad.square().sum()
                spread = (position.expand(b, -1, -1), pad[: varying - x.shape[-1] - position.shape[-1]].expand(b, x.shape[1], -1))
                x = torch.cat((x, *spread), -1)  # (b, m, varying)
            else:
                total, squares = x.sum(-1, keepdim=True), x.square().sum(-1, keepdim=True)
                x = x[..., :varying]
            mean = total / c.d_model
            over = (squares / c.d_model - mean.square() + EPSILON).rsqrt()  # (b, m, 1)
            which = x.new_zeros(3)
            which[number] = 1
            ones = over.new_ones(1, 1, 1)
            rows.append(_joined(x * over, which * over, -mean * over, ones, width))
        fixed = [pad_audio[varying - c.channels[AUDIO] :], pad_image[varying - c.channels[IMAGE] :]]
        constant = torch.stack([*(each.expand(b, -1) for each in fixed), token[:, varying:]], 1)  # (b, 3, d_model - varying)
        return Inputs(torch.cat(rows, 1), varying, constant)

    def _queries(self, points: Points) -> Tensor:
        """Return the queries for the points and the label: (q + p + 1, d_query)."""
        c = self.config
        shape = (c.frames, c.image_size, c.image_size)
        t, h, w = points.image // (shape[1] * shape[2]), points.image // shape[2] % shape[1], points.image % shape[2]
        image = fourier([2 * i / n - 1 for i, n in zip((t, h, w), shape, strict=True)], shape, c.image_bands)
        audio = fourier([2 * points.audio / c.audio_points - 1], (c.samples,), c.audio_bands)
        # [0] makes the gradients separate tensors, as DDP needs, instead of views.
        queries = ((AUDIO, audio), (IMAGE, image), (LABEL, self.label_query[0][None]))
        return torch.cat([torch.cat((x, self.query_padding[name][0].expand(len(x), -1)), -1) for name, x in queries])

    def _tables_on(self, where: torch.device) -> dict[str, Tensor]:
        """Return the position encodings of all inputs, (m, channels), keyed by modality.

        They are computed once per device. They are not buffers, because DDP would broadcast buffers.
        """
        if where not in self._tables:
            c = self.config
            side = c.image_size // c.patch
            with torch.no_grad(), torch.autocast(where.type, enabled=False):
                grid = torch.meshgrid(*(torch.linspace(-1, 1, n, device=where) for n in (c.frames, side, side)), indexing="ij")
                shape = (c.frames, c.image_size, c.image_size)
                line = torch.linspace(-1, 1, c.audio_points, device=where)
                self._tables[where] = {
                    IMAGE: fourier([each.flatten() for each in grid], shape, c.image_bands),
                    AUDIO: fourier([line], (c.samples,), c.audio_bands),
                }
        return self._tables[where]

    def optimizer(self, lr: float, weight_decay: float) -> torch.optim.AdamW:
        """Return AdamW, fused on CPUs and GPUs. On XLA its step count is a tensor, so that XLA compiles the step only once."""
        on = next(self.parameters()).device.type
        kernel: dict[str, Any] = {"capturable": True} if on == "xla" else {"fused": on in ("cpu", "cuda")}
        return torch.optim.AdamW(self.parameters(), lr=lr, weight_decay=weight_decay, **kernel)


def pixels(video: Tensor) -> Tensor:
    """Scale bytes to the range 0 to 1. Floating-point values are returned unchanged."""
    return video if video.is_floating_point() else video.float() / 255


def sound(audio: Tensor) -> Tensor:
    """Scale 16-bit samples to the range -1 to 1. Floating-point values are returned unchanged."""
    return audio if audio.is_floating_point() else audio.float() / 32768


def patches(video: Tensor, size: int) -> Tensor:
    """Divide frames (b, t, h, w, 3) into patches (b, t h/size w/size, size size 3)."""
    b, t, h, w, c = video.shape
    cut = video.view(b, t, h // size, size, w // size, size, c).permute(0, 1, 2, 4, 3, 5, 6)
    return cut.reshape(b, t * (h // size) * (w // size), size * size * c)


def fourier(at: list[Tensor], resolution: tuple[int, ...], bands: int) -> Tensor:
    """Return the position encodings of n places, (n, d + 2 d bands). `at` has their d coordinates, each (n,) from -1 to 1.

    An encoding consists of the coordinates x, then sin(pi f x) for all dimensions and frequencies f, and then the cosines. A
    dimension's frequencies are evenly spaced from 1 to half its resolution (section B.1 of the paper).
    """
    place = torch.stack(at, -1)  # (n, d)
    f = torch.stack([torch.linspace(1.0, size / 2, bands, device=place.device) for size in resolution])  # (d, bands)
    angles = math.pi * (place[..., None] * f).flatten(1)  # (n, d bands)
    return torch.cat((place, angles.sin(), angles.cos()), -1)


# Losses


class Losses(NamedTuple):
    """A micro-batch's losses, each summed over the clips with weight 1 and divided by the total number of clips."""

    image: Tensor  # mean absolute difference of pixels from 0 to 1
    audio: Tensor  # mean absolute difference of audio samples from -1 to 1
    label: Tensor  # cross-entropy in nats


def targets(video: Tensor, audio: Tensor, points: Points, config: Config) -> tuple[Tensor, Tensor]:
    """Return the true pixels (b, p, 3) and audio patches (b, q, samples_per_patch) at the points."""
    image = pixels(video.flatten(1, 3)[:, points.image])
    return image, sound(audio.unflatten(1, (-1, config.samples_per_patch))[:, points.audio])


def losses(made: Decoded, image: Tensor, audio: Tensor, label: Tensor, weight: Tensor) -> Losses:
    """Return the losses of a reconstruction. `weight`, (b,), is 0 for clips to ignore, and otherwise 1."""
    each = (
        (made.image.float() - image).abs().mean((1, 2)),  # (b,)
        (made.audio.float() - audio).abs().mean((1, 2)),
        F.cross_entropy(made.label.float(), label, reduction="none"),
    )
    return Losses(*((loss * weight).mean() for loss in each))


# Weights under the names of Hugging Face


_NAMES = (
    (r"^perceiver\.embeddings\.latents$", "latents"),
    (r"^perceiver\.input_preprocessor\.padding\.(\w+)$", r"padding.\1"),
    (r"^perceiver\.input_preprocessor\.mask\.label$", "hidden_label"),
    (r"^perceiver\.encoder\.cross_attention\.", "encoder."),
    (r"^perceiver\.encoder\.self_attends\.", "self_attends."),
    (r"^perceiver\.decoder\.modalities\.label\.decoder\.output_position_encodings\.position_embeddings$", "label_query"),
    (r"^perceiver\.decoder\.padding\.(\w+)$", r"query_padding.\1"),
    (r"^perceiver\.decoder\.decoder\.decoding_cross_attention\.", "decoder."),
    (r"^perceiver\.decoder\.decoder\.final_layer\.", "final."),
    (r"^perceiver\.output_postprocessor\.modalities\.(\w+)\.classifier\.", r"heads.\1."),
    (r"\.attention\.self\.layernorm1\.", ".attention.norm_q."),
    (r"\.attention\.self\.layernorm2\.", ".attention.norm_kv."),
    (r"\.attention\.self\.", ".attention."),
    (r"\.attention\.output\.dense\.", ".attention.out."),
    (r"\.layernorm\.", ".norm."),
    (r"\.mlp\.dense(\d)\.", r".fc\1."),
)
_UNUSED = re.compile(r"^perceiver\.input_preprocessor\.mask\.(audio|image)$")  # masks, applied with probability 0


def config_of(published: Mapping[str, Any], dropout: float | None = None) -> Config:
    """Return the sizes in a Hugging Face config.json. Raises OutlastError for another kind of Perceiver."""
    usual = {"use_query_residual": True, "cross_attention_shape_for_attention": "kv", "hidden_act": "gelu"}
    for name, value in {**usual, "qk_channels": None, "v_channels": None}.items():
        if published.get(name, value) != value:
            raise OutlastError(f"config.json has {name} {published[name]!r}, and this model is written for {value!r}")
    shape = published.get("output_shape", (1, 16, 224, 224))
    widening = {published.get(f"{which}_attention_widening_factor", 1) for which in ("self", "cross")}
    if len(widening) > 1:
        raise OutlastError("config.json has two widening factors, and this model has one")
    names = published.get("id2label") or {}
    return Config(
        frames=published.get("num_frames", 16),
        image_size=shape[2],
        audio_per_frame=published.get("audio_samples_per_frame", 1920),
        classes=published.get("num_labels") or len(names) or 2,
        num_latents=published.get("num_latents", 256),
        d_latents=published.get("d_latents", 1280),
        num_blocks=published.get("num_blocks", 1),
        num_self_attends=published.get("num_self_attends_per_block", 26),
        num_heads=published.get("num_self_attention_heads", 8),
        num_cross_heads=published.get("num_cross_attention_heads", 8),
        widening=widening.pop(),
        d_output=published.get("output_num_channels", 512),
        samples_per_patch=published.get("samples_per_patch", 16),
        label_channels=published.get("_label_trainable_num_channels", 1024),
        dropout=published.get("attention_probs_dropout_prob", 0.1) if dropout is None else dropout,
    )


def imported(weights: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """Rename weights of Hugging Face's model or this recipe to this module's names. Raises OutlastError for other weights."""
    renamed = {}
    for name, tensor in weights.items():
        if _UNUSED.match(name):
            continue
        for pattern, to in _NAMES:
            name = re.sub(pattern, to, name)
        renamed[name] = tensor
    with torch.device("meta"):
        return results.fitted(renamed, Perceiver(config), "the weights")
