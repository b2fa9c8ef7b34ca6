"""The patches of an image as tokens, with the names of ``flash_attn.layers.patch_embed``."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ..call.checks import ignored


class PatchEmbed(nn.Module):
    """A linear layer of each patch of an image.

    Args:
        img_size, patch_size: pixels of a side, or (height, width).
        in_chans: channels of the image.
        embed_dim: number of features of a token.
        norm_layer: function of embed_dim that returns a norm of the tokens.
        flatten: return the tokens in one row instead of a grid.
        bias: whether the layer has a bias.
        fused_bias_fc: which kernel flash_attn takes; it changes no result here.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        norm_layer: Callable[[int], nn.Module] | None = None,
        flatten: bool = True,
        bias: bool = True,
        fused_bias_fc: bool = False,
    ) -> None:
        super().__init__()
        ignored("PatchEmbed", fused_bias_fc=fused_bias_fc)
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.patch_size = (patch_size,) * 2 if isinstance(patch_size, int) else patch_size
        self.grid_size = tuple(a // b for a, b in zip(self.img_size, self.patch_size, strict=True))
        self.num_patches = self.grid_size[0] * self.grid_size[1]
        self.flatten = flatten
        pixels = in_chans * self.patch_size[0] * self.patch_size[1]
        self.proj = nn.Linear(pixels, embed_dim, bias)
        self.norm = norm_layer(embed_dim) if norm_layer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> (batch, num_patches, embed_dim), or without flatten
        (batch, rows, columns, embed_dim). ValueError if the image has another size.
        """
        if x.shape[-2:] != self.img_size:
            raise ValueError(f"x: got an image of {tuple(x.shape[-2:])}, want {self.img_size}")
        patches = F.unfold(x, self.patch_size, stride=self.patch_size).transpose(1, 2)
        tokens = self.proj(patches)
        return self.norm(tokens if self.flatten else tokens.unflatten(1, self.grid_size))
