"""LoRA+: a learning rate of its own for the factor B of every adapter (Hayou et al., 2024, arXiv:2402.12354).

The factor A, and weights that are trained whole, have the learning rate `optim.lr`.  Core's schedule scales both rates.
"""

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride

from sft.config import Config
from sft.mcore.lora import adapted


def overrides_of(config: Config, chunks: list[DistributedDataParallel]) -> dict[ParamKey, ParamGroupOverride]:
    """The rates of core's group of parameters that holds every B; nothing if these are those of A.

    lr 1e-4, min_lr 1e-5, lr_ratio 16 -> max_lr 1.6e-3, min_lr 1.6e-4
    """
    ratio = config.lora.lr_ratio
    if ratio == 1.0:
        return {}
    b_ids = {id(b) for factors in adapted.factors_of(chunks) for b in factors.b}
    key = ParamKey(predicate=ParamPredicate(name="lora_B", fn=lambda param: id(param) in b_ids))
    return {key: {"max_lr": config.optim.lr * ratio, "min_lr": config.optim.min_lr * ratio}}
