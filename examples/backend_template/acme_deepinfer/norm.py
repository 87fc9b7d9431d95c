"""RMSNorm whose order of additions is written down, so that a row cannot notice its neighbours."""

from torch import Tensor
from torch.nn.functional import pad

from acme_deepinfer import BACKEND
from deepinfer.ops import norm as norm_ops


@BACKEND.implements(norm_ops.rms_norm)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Squares are added as a tree of halves that depends on the width alone: D2 by construction."""
    wide = x.float()
    part = wide.square()
    while part.shape[-1] > 1:
        left, right = pad(part, (0, part.shape[-1] % 2)).chunk(2, -1)
        part = left + right
    y = wide / (part / x.shape[-1] + eps).sqrt()
    return (y if weight is None else y * weight.float()).to(x.dtype)
