"""Vision transformers, with the names of ``flash_attn.models.vit``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.patch_embed import PatchEmbed
from ..modules.block import Block, MakeLayer, StochasticDepth, norm_of
from ..modules.mha import MHA
from ..modules.mlp import FusedMLP, Mlp

# Arguments of `VisionTransformer` that it supports with these values only.
_SUPPORTED = {
    "global_pool": "token",
    "init_values": None,
    "class_token": True,
    "pre_norm": False,
    "fc_norm": None,
    "weight_init": "",
}


def create_mixer_cls(
    num_heads: int,
    qkv_bias: bool,
    attn_drop: float,
    use_flash_attn: bool,
    fused_bias_fc: bool,
    cross_attn: bool = False,
) -> partial[MHA]:
    """The function that makes a layer's attention from the number of features; see `MHA`."""
    return partial(
        MHA,
        num_heads=num_heads,
        cross_attn=cross_attn,
        qkv_proj_bias=qkv_bias,
        dropout=attn_drop,
        fused_bias_fc=fused_bias_fc,
        use_flash_attn=use_flash_attn,
    )


def create_mlp_cls(
    embed_dim: int, mlp_ratio: float, act_layer: Callable[[], Any], fused_mlp: bool
) -> partial[Any]:
    """The function that makes a layer's MLP from the number of features; with fused_mlp its
    activation is GELU with tanh, as in flash_attn, whatever act_layer says.
    """
    hidden_features = int(embed_dim * mlp_ratio)
    if fused_mlp:
        return partial(FusedMLP, hidden_features=hidden_features)
    return partial(Mlp, hidden_features=hidden_features, activation=act_layer())


def create_block(
    embed_dim: int,
    num_heads: int,
    mlp_ratio: float,
    qkv_bias: bool,
    drop_rate: float,
    attn_drop_rate: float,
    drop_path1: float,
    drop_path2: float,
    norm_layer: MakeLayer,
    act_layer: Callable[[], Any],
    use_flash_attn: bool,
    fused_bias_fc: bool,
    fused_mlp: bool,
    fused_dropout_add_ln: bool,
    layer_idx: int | None = None,
    n_layer: int | None = None,
    last_layer_subset: bool = False,
) -> Block:
    """One layer, with its residual stream in float32. With last_layer_subset, the layer n_layer - 1
    has cross-attention, so that it may work for some of the tokens.
    """
    cross_attn = last_layer_subset and n_layer is not None and layer_idx == n_layer - 1
    kernels = (use_flash_attn, fused_bias_fc)
    return Block(
        embed_dim,
        create_mixer_cls(num_heads, qkv_bias, attn_drop_rate, *kernels, cross_attn),
        create_mlp_cls(embed_dim, mlp_ratio, act_layer, fused_mlp),
        norm_layer,
        resid_dropout1=drop_rate,
        resid_dropout2=drop_rate,
        drop_path1=drop_path1,
        drop_path2=drop_path2,
        fused_dropout_add_ln=fused_dropout_add_ln,
        residual_in_fp32=True,
    )


class VisionTransformer(nn.Module):
    """A transformer of the patches of an image, whose class is read from a token of its own
    (Dosovitskiy et al. 2020, https://arxiv.org/abs/2010.11929).

    Args:
        img_size, patch_size, in_chans, embed_dim: as in `PatchEmbed`.
        num_classes: number of logits; with 0 the model returns features.
        depth: number of layers.
        num_heads, qkv_bias: as in `MHA`.
        mlp_ratio: features of an MLP for each feature of a token.
        no_embed_class: the class token gets no position embedding.
        drop_rate: dropout rate of tokens and branches.
        attn_drop_rate: dropout rate of the attention probabilities.
        drop_path_rate: rate of `StochasticDepth` of the last layer; it grows linearly from 0.
        embed_layer: function with the arguments of `PatchEmbed` that returns such a layer.
        norm_layer: function of embed_dim; a LayerNorm with an epsilon of 1e-6 by default.
        act_layer: function that returns the activation of the MLPs, ``nn.GELU`` by default.
        fused_mlp: the activation is GELU with tanh instead.
        use_flash_attn, fused_bias_fc, fused_dropout_add_ln: which kernels flash_attn takes; they
            change no result here.
        global_pool, init_values, class_token, pre_norm, fc_norm, weight_init: as in timm;
            ValueError for other values than their defaults.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        init_values: float | None = None,
        class_token: bool = True,
        no_embed_class: bool = False,
        pre_norm: bool = False,
        fc_norm: bool | None = None,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        weight_init: str = "",
        embed_layer: Callable[..., Any] = PatchEmbed,
        norm_layer: MakeLayer | None = None,
        act_layer: Callable[[], Any] | None = None,
        use_flash_attn: bool = False,
        fused_bias_fc: bool = False,
        fused_mlp: bool = False,
        fused_dropout_add_ln: bool = False,
    ) -> None:
        given = locals()
        for name, value in _SUPPORTED.items():
            if given[name] != value:
                raise ValueError(f"{name}: got {given[name]!r}, want {value!r}")
        super().__init__()
        self.num_classes = num_classes
        self.global_pool = global_pool
        self.num_features = self.embed_dim = embed_dim
        self.num_prefix_tokens = 1
        self.no_embed_class = no_embed_class
        norm_layer = norm_layer or partial(nn.LayerNorm, eps=1e-6)
        extra = {"fused_bias_fc": fused_bias_fc} if embed_layer is PatchEmbed else {}
        image = {"img_size": img_size, "patch_size": patch_size, "in_chans": in_chans}
        self.patch_embed = embed_layer(**image, embed_dim=embed_dim, bias=True, **extra)
        positions = self.patch_embed.num_patches + (not no_embed_class)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.empty(1, positions, embed_dim))
        # A block begins with the dropout of the branch before it: of the tokens in the first.
        drop_paths = [0.0, *(drop_path_rate * i / max(depth - 1, 1) for i in range(depth))]
        sizes = (embed_dim, num_heads, mlp_ratio, qkv_bias, drop_rate, attn_drop_rate)
        layers = (norm_layer, act_layer or nn.GELU)
        kernels = (use_flash_attn, fused_bias_fc, fused_mlp, fused_dropout_add_ln)
        self.blocks = nn.ModuleList(
            create_block(
                *sizes, drop_paths[i], drop_paths[i + 1], *layers, *kernels, i, depth, True
            )
            for i in range(depth)
        )
        self.dropout = nn.Dropout(drop_rate)
        self.drop_path = StochasticDepth(drop_paths[-1])
        self.norm = norm_layer(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.init_weights()

    def init_weights(self, mode: str = "") -> None:
        """Initialise all weights as timm does; raises ValueError for another mode."""
        if mode:
            raise ValueError(f"mode: got {mode!r}, want ''")
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        nn.init.normal_(self.cls_token, std=1e-6)
        for child in self.children():
            child.apply(init_weights_vit_timm)

    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that an optimizer should not decay."""
        return {"pos_embed", "cls_token"}

    def forward_features(self, x: Tensor, all_tokens: bool = True) -> Tensor:
        """Images (batch, channels, height, width) -> features of the class and of the patches,
        (batch, 1 + num_patches, embed_dim); without all_tokens only the first, (batch, 1,
        embed_dim), for which alone the last layer then works.
        """
        tokens = self.patch_embed(x)
        cls_token = self.cls_token.expand(len(tokens), -1, -1)
        if self.no_embed_class:
            hidden = torch.cat((cls_token, tokens + self.pos_embed), dim=1)
        else:
            hidden = torch.cat((cls_token, tokens), dim=1) + self.pos_embed
        stream: Any = None
        *first, last = self.blocks
        for block in first:
            hidden, stream = block(hidden, stream)
        hidden, stream = last(hidden, stream, None if all_tokens else slice(0, 1))
        return norm_of(self.norm, stream + self.drop_path(self.dropout(hidden)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Features (batch, tokens, embed_dim) -> logits (batch, num_classes), or with pre_logits
        the feature of the class, (batch, embed_dim).
        """
        return x[:, 0] if pre_logits else self.head(x[:, 0])

    def forward(self, x: Tensor) -> Tensor:
        """Images (batch, channels, height, width) -> logits (batch, num_classes)."""
        return self.forward_head(self.forward_features(x, all_tokens=False))

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state dict of this model, or of timm's with the same sizes."""
        ours = {}
        last = f"blocks.{len(self.blocks) - 1}.mixer."
        for name, x in state_dict.items():
            name = name.replace(".attn.qkv.", ".mixer.Wqkv.")
            name = name.replace(".attn.proj.", ".mixer.out_proj.")
            if name == "patch_embed.proj.weight":
                x = x.flatten(1)  # of a convolution
            if name.startswith(f"{last}Wqkv."):
                kind = name.rpartition(".")[2]
                ours[f"{last}Wq.{kind}"] = x[: self.embed_dim]
                name, x = f"{last}Wkv.{kind}", x[self.embed_dim :]
            ours[name] = x
        return super().load_state_dict(ours, strict, assign)


def init_weights_vit_timm(module: Any, name: str = "") -> None:
    """Initialise a linear layer as timm does, or a module by its own `init_weights`."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif hasattr(module, "init_weights"):
        module.init_weights()


def vit_base_patch16_224(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """ViT-B/16 with 86 million parameters; kwargs of `VisionTransformer`. ValueError with
    `pretrained`, for which timm's weights can be loaded.
    """
    if pretrained:
        raise ValueError("pretrained: got True, want False; load_state_dict takes timm's weights")
    return VisionTransformer(patch_size=16, embed_dim=768, depth=12, num_heads=12, **kwargs)
