"""The layers and functions of torch.nn, each in an inner loop: right to 1e-5 or refused, never silently wrong."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from . import matrix, registry
from .matrix import Case, numbers


class After(nn.Module):
    """A linear layer, its output in a given shape, then the layer or function to be tried."""

    def __init__(self, layer: Callable[..., Any], *shape: int, size: int = 4) -> None:
        super().__init__()
        self.linear, self.layer, self.shape = nn.Linear(3, math.prod(shape)), layer, (size, *shape)

    def forward(self, x: Tensor) -> Any:
        return self.layer(self.linear(x).reshape(self.shape))


def after(layer: Callable[..., Any], *shape: int, **more: Any) -> Case:
    return Case(lambda: After(layer, *shape, **more))


def image(layer: Callable[[], nn.Module], *shape: int, batch: int = 3) -> Case:
    return Case(layer, lambda: (numbers(batch, *shape),))


def loss(function: Callable[[Tensor, Any], Tensor], target: Any, *shape: int) -> Case:
    return Case(lambda: After(lambda out: function(out, target()), *(shape or (3,))))


def sequence(layer: Callable[[], nn.Module], call: Any = None, width: int = 4) -> Case:
    return Case(layer, lambda: (numbers(3, 5, width),), call or (lambda net, x: net(x)))


class Attends(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inside, self.options = nn.MultiheadAttention(4, 2, batch_first=True), options

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x, x, x, **self.options)[0]


class Projected(nn.Module):
    """Queries, keys and values of the bare function."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.options = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), options

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), **self.options)


class Pair(nn.Module):
    """Two linear maps of the input, compared by a function."""

    def __init__(self, function: Callable[..., Any], width: int = 3) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(3, width), nn.Linear(3, width), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.a(x), self.b(x), x)


def whole(change: Callable[[nn.Module], nn.Module]) -> Case:
    return Case(lambda: nn.Sequential(change(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)))


def eight() -> tuple[Any, ...]:
    return (torch.tensor([[0, 1], [2, 5], [3, 3]]),)


def labels() -> Tensor:
    return torch.tensor([0, 2, 1, 1])


def signs() -> Tensor:
    return torch.tensor([1.0, -1.0, 1.0, -1.0])


def sampled(values: Tensor, points: Tensor) -> Tensor:
    return F.grid_sample(values, points, align_corners=False)


def grid(theta: Tensor) -> Tensor:
    return F.affine_grid(theta, [2, 1, 2, 2], align_corners=False)


def ctc(x: Tensor) -> Tensor:
    lengths = torch.tensor([4, 4]), torch.tensor([2, 2])
    return F.ctc_loss(x.log_softmax(-1), torch.tensor([[1, 2], [2, 1]]), *lengths)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    name: getattr(nn, name)()
    for name in (
        "ELU", "Hardtanh", "Hardswish", "LeakyReLU", "LogSigmoid", "ReLU", "ReLU6", "RReLU", "SELU",
        "CELU", "GELU", "Sigmoid", "SiLU", "Mish", "Softplus", "Softsign", "Tanh", "Tanhshrink",
    )
}  # fmt: skip
ACTIVATIONS |= {
    "Hardshrink": nn.Hardshrink(0.2), "Softshrink": nn.Softshrink(0.2), "Threshold": nn.Threshold(0.1, 0.5),
    "GELU, tanh": nn.GELU(approximate="tanh"), "Softmin": nn.Softmin(-1), "Softmax": nn.Softmax(-1),
    "LogSoftmax": nn.LogSoftmax(-1), "Dropout": nn.Dropout(0.4), "AlphaDropout": nn.AlphaDropout(0.4),
    "Identity": nn.Identity(),
}  # fmt: skip

CASES: dict[str, Case] = {
    "Linear": Case(lambda: nn.Linear(3, 2)),
    "Bilinear": Case(lambda: nn.Bilinear(3, 3, 2), lambda: (numbers(4, 3), numbers(4, 3, seed=2))),
    "PReLU": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4))),
    "GLU": after(nn.GLU(), 6),
    "Softmax2d": after(nn.Softmax2d(), 2, 2, 2),
    **{name: after(layer, 6) for name, layer in ACTIVATIONS.items()},
    "Hardsigmoid": after(nn.Hardsigmoid(), 6)._replace(refused="no second derivative"),
    "Dropout1d": after(nn.Dropout1d(0.4), 3, 2),
    "Dropout2d": after(nn.Dropout2d(0.4), 3, 2, 2),
    "Dropout3d": after(nn.Dropout3d(0.4), 3, 1, 2, 2),
    "FeatureAlphaDropout": after(nn.FeatureAlphaDropout(0.4), 3, 2, 2),
    "Conv1d": image(lambda: nn.Conv1d(2, 3, 2), 2, 5),
    "Conv2d": image(lambda: nn.Conv2d(1, 2, 2, padding=1), 1, 3, 3),
    "Conv2d, grouped and dilated": image(lambda: nn.Conv2d(4, 4, 2, groups=2, dilation=2), 4, 4, 4),
    "Conv2d, padding by reflection": image(lambda: nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), 1, 3, 3),
    "Conv3d": image(lambda: nn.Conv3d(1, 2, 2), 1, 2, 3, 3),
    "ConvTranspose1d": image(lambda: nn.ConvTranspose1d(2, 3, 2), 2, 4),
    "ConvTranspose2d": image(lambda: nn.ConvTranspose2d(1, 2, 2, stride=2), 1, 3, 3),
    "ConvTranspose3d": image(lambda: nn.ConvTranspose3d(1, 2, 2), 1, 2, 2, 2),
    "Unfold": after(nn.Unfold(2), 1, 3, 3),
    "Fold": after(nn.Fold((3, 3), 2), 4, 4),
    "MaxPool1d": after(nn.MaxPool1d(2), 2, 4),
    "MaxPool2d": after(nn.MaxPool2d(2), 1, 4, 4),
    "MaxPool3d": after(nn.MaxPool3d(2), 1, 2, 4, 4),
    "MaxUnpool2d": after(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), 1, 4, 4),
    "AvgPool1d": after(nn.AvgPool1d(2), 2, 4),
    "AvgPool2d": after(nn.AvgPool2d(2), 1, 4, 4),
    "AvgPool3d": after(nn.AvgPool3d(2), 1, 2, 4, 4),
    "FractionalMaxPool2d": after(nn.FractionalMaxPool2d(2, output_size=2), 1, 4, 4),
    "FractionalMaxPool3d": after(nn.FractionalMaxPool3d(2, output_size=2), 1, 4, 4, 4),
    "LPPool1d": after(lambda x: F.lp_pool1d(x.abs() + 0.1, 2, 2), 2, 4),
    "LPPool2d": after(lambda x: F.lp_pool2d(x.abs() + 0.1, 3, 2), 1, 4, 4),
    "AdaptiveMaxPool1d": after(nn.AdaptiveMaxPool1d(2), 2, 5),
    "AdaptiveMaxPool2d": after(nn.AdaptiveMaxPool2d(2), 1, 3, 3),
    "AdaptiveMaxPool3d": after(nn.AdaptiveMaxPool3d(2), 1, 3, 3, 3),
    "AdaptiveAvgPool1d": after(nn.AdaptiveAvgPool1d(2), 2, 5),
    "AdaptiveAvgPool2d": after(nn.AdaptiveAvgPool2d(2), 1, 3, 3),
    "AdaptiveAvgPool3d": after(nn.AdaptiveAvgPool3d(2), 1, 3, 3, 3),
    "ReflectionPad1d": after(nn.ReflectionPad1d(1), 2, 3),
    "ReflectionPad2d": after(nn.ReflectionPad2d(1), 1, 3, 3),
    "ReflectionPad3d": after(nn.ReflectionPad3d(1), 1, 2, 2, 2),
    "ReplicationPad1d": after(nn.ReplicationPad1d(1), 2, 3),
    "ReplicationPad2d": after(nn.ReplicationPad2d(1), 1, 3, 3),
    "ReplicationPad3d": after(nn.ReplicationPad3d(1), 1, 2, 2, 2),
    "ZeroPad2d": after(nn.ZeroPad2d(1), 1, 2, 2),
    "ConstantPad1d": after(nn.ConstantPad1d(1, 0.5), 2, 3),
    "CircularPad2d": after(nn.CircularPad2d(1), 1, 2, 2),
    "BatchNorm1d": Case(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
    "BatchNorm1d in eval": Case(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval()),
    "BatchNorm2d": image(lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2)), 1, 3, 3),
    "BatchNorm2d without statistics": image(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 2), nn.BatchNorm2d(2, track_running_stats=False)), 1, 3, 3
    ),
    "BatchNorm3d": image(lambda: nn.BatchNorm3d(2), 2, 2, 2, 2),
    "SyncBatchNorm": Case(lambda: nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3))),
    "GroupNorm": image(lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.GroupNorm(2, 4)), 1, 3, 3),
    "InstanceNorm1d": Case(lambda: After(nn.InstanceNorm1d(2, affine=True), 2, 4)),
    "InstanceNorm2d": Case(lambda: After(nn.InstanceNorm2d(2), 2, 2, 2)),
    "InstanceNorm3d": Case(lambda: After(nn.InstanceNorm3d(1), 1, 2, 2, 2)),
    "LayerNorm": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))),
    "RMSNorm": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.RMSNorm(4))),
    "LocalResponseNorm": after(nn.LocalResponseNorm(2), 3, 2, 2),
    "RNN": sequence(lambda: nn.RNN(4, 3)),
    "RNN of ReLUs": sequence(lambda: nn.RNN(4, 3, nonlinearity="relu")),
    "LSTM": sequence(lambda: nn.LSTM(4, 3)),
    "LSTM, two layers, both ways, projected": sequence(lambda: nn.LSTM(4, 2, 2, bidirectional=True, proj_size=1)),
    "GRU": sequence(lambda: nn.GRU(4, 3, batch_first=True)),
    "RNNCell": Case(lambda: nn.RNNCell(3, 4)),
    "LSTMCell": Case(lambda: nn.LSTMCell(3, 4)),
    "GRUCell": Case(lambda: nn.GRUCell(3, 4)),
    "MultiheadAttention": sequence(Attends),
    "MultiheadAttention without weights": sequence(lambda: Attends(need_weights=False)),
    "MultiheadAttention in eval": sequence(lambda: Attends(need_weights=False).eval()),
    "scaled_dot_product_attention": sequence(Projected),
    "scaled_dot_product_attention, causal": sequence(lambda: Projected(is_causal=True)),
    "TransformerEncoderLayer": sequence(lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
    "TransformerEncoderLayer, norm first": sequence(
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True, norm_first=True, activation="gelu")
    ),
    "TransformerDecoderLayer": sequence(
        lambda: nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, batch_first=True), lambda net, x: net(x, x.flip(0))
    ),
    "TransformerEncoder": sequence(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2)
    ),
    "Transformer": sequence(
        lambda: nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True), lambda net, x: net(x, x.flip(0))
    ),
    "Embedding": Case(lambda: nn.Sequential(nn.Embedding(6, 3), nn.Tanh()), eight),
    "Embedding, padded": Case(lambda: nn.Sequential(nn.Embedding(6, 3, padding_idx=0), nn.Tanh()), eight),
    "EmbeddingBag, sum": Case(lambda: nn.EmbeddingBag(6, 3, mode="sum"), eight, refused="EmbeddingBag"),
    "EmbeddingBag, mean": Case(lambda: nn.EmbeddingBag(6, 3, mode="mean"), eight, refused="EmbeddingBag"),
    "EmbeddingBag, max": Case(lambda: nn.EmbeddingBag(6, 3, mode="max"), eight, refused="EmbeddingBag"),
    "CosineSimilarity": Case(lambda: Pair(lambda a, b, x: F.cosine_similarity(a, b))),
    "PairwiseDistance": Case(lambda: Pair(lambda a, b, x: F.pairwise_distance(a, b))),
    "cdist": Case(lambda: Pair(lambda a, b, x: torch.cdist(a, b)), refused="cdist"),
    "pdist": after(F.pdist, 3)._replace(refused="pdist"),
    "normalize": after(F.normalize, 3),
    "gumbel_softmax": after(lambda x: F.gumbel_softmax(x, tau=0.7), 3),
    "L1Loss": loss(F.l1_loss, lambda: numbers(4, 3, seed=4)),
    "MSELoss": loss(F.mse_loss, lambda: numbers(4, 3, seed=4)),
    "CrossEntropyLoss": loss(F.cross_entropy, labels),
    "CrossEntropyLoss, smoothed and weighted": loss(
        lambda x, t: F.cross_entropy(x, t, torch.tensor([1.0, 2.0, 0.5]), label_smoothing=0.1), labels
    ),
    "CTCLoss": loss(lambda x, t: ctc(x), lambda: None, 2, 3)._replace(refused="ctc_loss"),
    "NLLLoss": loss(lambda x, t: F.nll_loss(x.log_softmax(-1), t), labels),
    "PoissonNLLLoss": loss(F.poisson_nll_loss, lambda: numbers(4, 3, seed=4).abs()),
    "GaussianNLLLoss": Case(
        lambda: Pair(lambda a, b, x: F.gaussian_nll_loss(a, x, F.softplus(b) + 0.1)), lambda: (numbers(4, 3),)
    ),
    "KLDivLoss": loss(lambda x, t: F.kl_div(x.log_softmax(-1), t), lambda: numbers(4, 3).softmax(-1)),
    "BCELoss": loss(lambda x, t: F.binary_cross_entropy(torch.sigmoid(x), t), lambda: numbers(4, 3).sigmoid()),
    "BCEWithLogitsLoss": loss(F.binary_cross_entropy_with_logits, lambda: numbers(4, 3).sigmoid()),
    "MarginRankingLoss": Case(
        lambda: Pair(lambda a, b, x: F.margin_ranking_loss(a**2, b, torch.ones(4, 3), margin=0.5))
    ),
    "HingeEmbeddingLoss": loss(lambda x, t: F.hinge_embedding_loss(x**2, t[:, None]), signs),
    "MultiLabelMarginLoss": loss(
        lambda x, t: F.multilabel_margin_loss(x**2, t),
        lambda: torch.tensor([[0, -1, 1], [2, 1, -1], [1, -1, 0], [2, 0, 1]]),
    )._replace(refused="no second derivative"),
    "HuberLoss": loss(lambda x, t: F.huber_loss(x, t, delta=0.5), lambda: numbers(4, 3, seed=4)),
    "SmoothL1Loss": loss(F.smooth_l1_loss, lambda: numbers(4, 3, seed=4)),
    "SoftMarginLoss": loss(lambda x, t: F.soft_margin_loss(x, t[:, None].expand(4, 3)), signs),
    "MultiLabelSoftMarginLoss": loss(F.multilabel_soft_margin_loss, lambda: (numbers(4, 3) > 0).double()),
    "CosineEmbeddingLoss": Case(lambda: Pair(lambda a, b, x: F.cosine_embedding_loss(a, b, signs()))),
    "MultiMarginLoss": loss(lambda x, t: F.multi_margin_loss(x**2, t), labels)._replace(refused="no second derivative"),
    "TripletMarginLoss": Case(lambda: Pair(lambda a, b, x: F.triplet_margin_loss(a, b, x))),
    "TripletMarginWithDistanceLoss": Case(
        lambda: Pair(lambda a, b, x: F.triplet_margin_with_distance_loss(a, b, x, distance_function=_squared))
    ),
    "AdaptiveLogSoftmaxWithLoss": Case(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(3, 5, [2]), call=lambda net, x: net(x, labels() + 1).loss
    ),
    "PixelShuffle": after(nn.PixelShuffle(2), 4, 2, 2),
    "PixelUnshuffle": after(nn.PixelUnshuffle(2), 1, 4, 4),
    "ChannelShuffle": after(nn.ChannelShuffle(2), 4, 2, 2),
    "Upsample, nearest": after(nn.Upsample(scale_factor=2), 1, 2, 2),
    "Upsample, bilinear": after(nn.Upsample(scale_factor=2, mode="bilinear"), 1, 2, 2),
    "Upsample, bicubic": after(nn.Upsample(scale_factor=2, mode="bicubic"), 1, 2, 2),
    "grid_sample": Case(
        lambda: Pair(lambda a, b, x: sampled(a.reshape(2, 1, 3, 2), 0.5 * b.tanh().reshape(2, 1, 3, 2)))
    ),
    "affine_grid": Case(lambda: Pair(lambda a, b, x: grid(a.reshape(2, 2, 3)))),
    "Flatten and Unflatten": after(nn.Sequential(nn.Flatten(), nn.Unflatten(1, (2, 3)), nn.Tanh()), 3, 2),
    "weight_norm": whole(parametrizations.weight_norm),
    "weight_norm by hook": whole(nn.utils.weight_norm),
    "spectral_norm": whole(parametrizations.spectral_norm)._replace(refused="spectral_norm in training mode"),
    "spectral_norm by hook": whole(nn.utils.spectral_norm)._replace(refused="spectral_norm in training mode"),
    "spectral_norm in eval": Case(lambda: whole(parametrizations.spectral_norm).make().eval()),
    "orthogonal": whole(parametrizations.orthogonal),
    "fft": after(lambda x: torch.fft.rfft(x).abs().square(), 6),
    "einsum": Case(lambda: Pair(lambda a, b, x: torch.einsum("bi,bj->ij", a, b))),
    "logsumexp and cumsum": after(lambda x: torch.logsumexp(x.cumsum(-1), -1), 5),
    "sort": after(lambda x: x.sort(-1).values ** 2, 5),
    "solve": Case(lambda: Pair(lambda a, b, x: torch.linalg.solve(a.T @ a + torch.eye(3), b.T))),
}  # fmt: skip


def _squared(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).square().sum(-1)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", help="the name of a single layer")


def run(args: argparse.Namespace) -> registry.Result:
    found = matrix.result(matrix.only(CASES, args.only), "layers", others=True)
    print("\n".join(found["table"]))
    return found


def smoke() -> registry.Result:
    return matrix.result(CASES, "layers", others=False)


row = matrix.row
