"""The plan of a conversion: which tensors and which LoraConfig an adapter shall have."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tools.checkpoint.change import (
    Change,
    Computed,
    Content,
    Source,
    TensorFile,
    json_file,
    refuse_ungathered,
    stored,
)
from tools.checkpoint.errors import CheckpointError
from tools.checkpoint.layout import ADAPTER_FILES, Checkpoint
from tools.lora import settings
from tools.lora.adapters import beside_factors, lora_modules
from tools.lora.base_layers import base_layers
from tools.lora.floats import require_floats
from tools.lora.origin import MARK, Given, Modules, Origin, origin_of
from tools.lora.recovering import Recovered
from tools.lora.serving import rank_option
from tools.lora.shrinking import Loss, Product, folded, overall, product_of, shrunk
from tools.lora.stacking import stacked_a, stacked_b


@dataclass(frozen=True)
class Shape:
    """How the result shall be: of which rank at most, at which error at most, with the scale in its factors."""

    max_rank: int | None = None
    max_error: float | None = None
    fold_scaling: bool = False

    def asks(self, config: Mapping[str, Any]) -> bool:
        """Whether an adapter with this configuration is not yet so."""
        too_high = self.max_rank is not None and settings.highest_rank(config) > self.max_rank
        return too_high or (self.fold_scaling and not settings.is_folded(config))


def conversion(given: Given, shape: Shape) -> Callable[[Checkpoint], Change]:
    """The plan for an adapter. What is recovered from base weights is computed once, however often it is planned."""
    recovered: dict[tuple[Any, ...], Recovered] = {}

    def recover(compute: Callable[[Modules], Recovered], modules: Modules) -> Recovered:
        key = tuple((m.name, m.r, m.scaling, m.A.shape, m.A.dtype, m.B.shape, m.B.dtype) for m in modules.values())
        if key not in recovered:
            recovered[key] = compute(modules)
        return recovered[key]

    def plan(trained: Checkpoint) -> Change:
        modules = _modules(trained)
        origin = origin_of(trained, modules, given, recover)
        if isinstance(origin, str):
            return _reshaped(trained, modules, origin, shape)
        return _converted(trained, modules, origin, shape)

    return plan


def _modules(trained: Checkpoint) -> Modules:
    config = trained.adapter_config
    if config is None or trained.adapter is None:
        what = "a full model" if trained.config is not None or trained.model else "no adapter"
        raise CheckpointError(trained.path, f"{what}: adapter_config.json is not there", "name the adapter directory")
    refuse_ungathered(trained)
    modules = lora_modules(config, trained.adapter)
    if not modules:
        raise CheckpointError(trained.path, "holds no lora_A and lora_B at all", "the save was cut short")
    beside_factors(config, trained.adapter)
    for source in (source for module in modules.values() for source in module.sources):
        require_floats(source)
    return modules


def _converted(trained: Checkpoint, modules: Modules, origin: Origin, shape: Shape) -> Change:
    config = trained.adapter_config or {}
    products = {
        name: Product(
            module, stacked_a(module, taken), stacked_b(module, taken), module.bias, 2 * module.r, module.scaling
        )
        for name, module in modules.items()
        for taken in [origin.factors[name]]
    }
    stacked = settings.doubled(config) | {"base_model_name_or_path": origin.base}
    products, new, losses = _in_shape(trained, products, stacked, shape)
    restored, dropped = base_layers(trained, modules, origin)
    then = f"; then {new['r']}" if losses else ""
    why = "for a scale of 1, the rest is in B" if losses or shape.fold_scaling else "so that the scale stays"
    details = {
        "base": origin.base,
        "rank": f"{config['r']} -> {stacked['r']}, for [A; A0] and [B, -B0]{then}",
        "lora_alpha": f"{config['lora_alpha']} -> {new['lora_alpha']}, {why}",
        "modules": len(modules),
        **origin.details,
        **({"restored": sorted(restored)} if restored else {}),
        **_shape_details(new, losses),
    }
    summary = f"rank {config['r']} -> {new['r']}: plain LoRA for {origin.base}"
    files = _files(trained, products, restored, dropped, new)
    return Change(summary, files, details, dropped, recorded=origin.recovered)


def _reshaped(trained: Checkpoint, modules: Modules, why: str, shape: Shape) -> Change:
    """The change of an adapter that belongs on its base already."""
    config = trained.adapter_config or {}
    if not shape.asks(config):
        return Change(f"{why}; nothing to do")
    products = {name: product_of(module) for name, module in modules.items()}
    products, new, losses = _in_shape(trained, products, config, shape)
    summary = f"{why}; rank {config['r']} -> {new['r']}" if losses else f"{why}; scale folded into B"
    return Change(summary, _files(trained, products, {}, frozenset(), new), _shape_details(new, losses))


def _in_shape(
    trained: Checkpoint, products: Mapping[str, Product], config: Mapping[str, Any], shape: Shape
) -> tuple[dict[str, Product], dict[str, Any], dict[str, Loss]]:
    """The products and the configuration as they were asked for, and what less rank costs by module."""
    if shape.max_rank is None or settings.highest_rank(config) <= shape.max_rank:
        if not shape.fold_scaling:
            return dict(products), dict(config), {}
        return {name: folded(product) for name, product in products.items()}, settings.folded(config), {}
    found = {name: shrunk(product, shape.max_rank) for name, product in products.items()}
    losses = {name: loss for name, (_, loss) in found.items()}
    total = overall(losses.values()).relative
    if shape.max_error is not None and total > shape.max_error:
        problem = f"rank {shape.max_rank} costs a relative error of {total:.3g}, more than {shape.max_error:g}"
        raise CheckpointError(trained.path, problem, "choose a greater --max-rank or --max-error")
    return {name: product for name, (product, _) in found.items()}, settings.limited(config, shape.max_rank), losses


def _shape_details(config: Mapping[str, Any], losses: Mapping[str, Loss]) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if losses:
        by_module = {name: f"{loss.relative:.3g}" for name, loss in losses.items()}
        details["relative error"] = {"overall": f"{overall(losses.values()).relative:.3g}", **by_module}
    if option := rank_option(rank := settings.highest_rank(config)):
        details["serving"] = f"rank {rank} needs vLLM's {option}" if option.startswith("--") else option
    return details


def _files(
    trained: Checkpoint,
    products: Mapping[str, Product],
    restored: Mapping[str, Computed],
    dropped: frozenset[str],
    config: Mapping[str, Any],
) -> dict[str, Content | None]:
    """The files of the adapter, as safetensors whatever it was before, its tensors under their names and in order."""
    assert trained.adapter is not None
    new: dict[str, Source] = dict(restored)
    for product in products.values():
        new |= {product.module.A.name: product.A, product.module.B.name: product.B}
        if product.module.bias and product.bias:
            new[product.module.bias.name] = product.bias
    tensors = {name: new.get(name, old) for name, old in stored(trained.adapter).items() if name not in dropped}
    weights = trained.adapter
    gone = {file.name for file in weights.files} | ({weights.index_name} if weights.index is not None else set())
    metadata = {**weights.files[0].metadata, **MARK}
    return {
        **dict.fromkeys(gone),
        ADAPTER_FILES[0]: TensorFile(tensors, metadata),
        "adapter_config.json": json_file(settings.portable(config)),
    }
