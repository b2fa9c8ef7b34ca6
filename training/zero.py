"""ZeRO with DeepSpeed (Rajbhandari et al. 2020), behind the interface of the other strategies.

Stage 1 divides the optimizer's numbers among the devices, stage 2 also the gradients, stage 3 also
the weights.
"""

from __future__ import annotations

from typing import Any

from lightning_fabric.strategies import DeepSpeedStrategy
from torch import Tensor


class Zero(DeepSpeedStrategy):
    """Fabric's strategy. The loop adds micro-batches up, as with DDP; DeepSpeed's step clips."""

    def __init__(self, stage: int, grad_clip: float) -> None:
        """`grad_clip`: largest norm of the gradient; 0: no limit."""
        super().__init__(
            config={
                "zero_optimization": {"stage": stage},
                "zero_allow_untested_optimizer": True,  # PyTorch's AdamW
                "zero_force_ds_cpu_optimizer": False,
                "gradient_clipping": grad_clip,
                "managed_gradient_accumulation": False,  # every step of the loop is a step
            }
        )

    def clip_gradients_norm(self, *args: Any, **options: Any) -> None:  # type: ignore[override]
        """Nothing: the step clips, and knows the norm afterwards."""

    def optimizer_step(self, optimizer: Any, **options: Any) -> Any:
        """The engine's step, which Fabric no longer recognises as one in newer DeepSpeeds."""
        return self.model.step()

    def gradient_norm(self) -> float | Tensor:
        """The norm of the last step's gradient, before clipping."""
        return self.model.get_global_grad_norm()
