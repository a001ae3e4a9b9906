"""Every value of a family's spec has an effect: set to the default, it changes the results.

Either the logits differ from transformers' by far more than parity allows, or the checkpoint is refused. So
the tiny models use each feature, which tests of parity cannot show. New families and fields are covered, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from manta.actors.targets.families import read_model
from manta.actors.targets.model.decoder import Decoder
from manta.actors.targets.model.model_spec import ModelSpec
from manta.actors.targets.model.tensor_parallel import Sharding, SingleRank
from manta.actors.targets.model.weights import TargetWeights
from manta.cluster.errors import CheckpointError, ConfigError
from support.checkpoints.families import FAMILIES
from support.checkpoints.tiny import make_tiny_target
from support.oracles.decoder_requests import MAX_LEN, TAPS, Requests, oracle

SAMPLE = torch.arange(6.0)
PARITY, NOTICED = 1e-4, 2e-3  # largest difference of a logit
NUM_TOKENS = 40
# Fields without a default, since all must say them: what a plain block says. It may depend on the others.
PLAIN: dict[tuple[str, str], Callable[[Any], object]] = {  # Any: dataclasses of the spec
    ("TargetAttention", "scale"): lambda mixer: mixer.head_dim**-0.5,
    ("RopeConfig", "kind"): lambda _: "default",
    ("Latent", "eps"): lambda _: 1e-2,
    ("RoutedMLP", "activation"): lambda _: "silu",
    ("RoutedMLP", "limit"): lambda mlp: 7.0 if mlp.activation == "swiglu_clamped" else None,
    ("MoeRouter", "score"): lambda router: "sigmoid" if router.score == "softmax" else "softmax",
    ("MoeRouter", "renormalize"): lambda router: not router.choose_first,  # its weights sum to 1 anyway
}
# Only read by backends, which then compute less: weights follow from their transforms.
TOLD_TO_BACKENDS = frozenset({"ModelSpec.fp32_norms"})

Mutation = tuple[str, ModelSpec]


def mutations(spec: ModelSpec) -> Iterator[Mutation]:
    """Yield one mutation per field that differs from its plain value anywhere, and one per transform."""
    seen: dict[str, tuple[type, Field[Any]]] = {}
    for node in nodes(spec):
        for field in fields(node):
            if (plain := plain_value(node, field)) is not MISSING and getattr(node, field.name) != plain:
                seen.setdefault(f"{type(node).__name__}.{field.name}", (type(node), field))
    for name, (kind, field) in seen.items():
        yield name, cast(ModelSpec, put_back(spec, kind, field))
    used = {"embedding", "final_norm"}.union(*(spec.layer_parts(i) for i in range(spec.num_layers)))
    for part in sorted(used):
        rule = spec.tensors[part]
        if rule.transform is not None and changes_values(rule.transform):
            untouched = {**spec.tensors, part: replace(rule, transform=None)}
            yield f"transform of {part}", replace(spec, tensors=untouched)


def changes_values(transform: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Return False for transforms that only keep weights in fp32, which shows in half precision only."""
    try:
        return not torch.equal(transform(SAMPLE), SAMPLE)
    except (IndexError, RuntimeError):
        return True  # of tensors with more dimensions


def plain_value(node: Any, field: Field[Any]) -> object:
    """Return the field's default, or MISSING if every model must set it."""
    if (plain := PLAIN.get((type(node).__name__, field.name))) is not None:
        return plain(node)
    return field.default if field.default_factory is MISSING else field.default_factory()


def nodes(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for item in value:
            yield from nodes(item)
    elif is_dataclass(value):
        yield value
        for field in fields(value):
            yield from nodes(getattr(value, field.name))


def put_back(value: Any, kind: type, field: Field[Any]) -> Any:
    """Return the spec with the field's plain value in every dataclass of a kind."""
    if isinstance(value, tuple):
        return tuple(put_back(item, kind, field) for item in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    inner = {f.name: put_back(getattr(value, f.name), kind, field) for f in fields(value)}
    changed = replace(value, **inner)
    return replace(changed, **{field.name: plain_value(changed, field)}) if type(value) is kind else changed


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("family"), request.param, seed=11)


def logits_of(folder: Path, spec: ModelSpec) -> Requests:
    weights = TargetWeights(folder, spec, Sharding(spec, 0, 1), torch.float32, torch.device("cpu"))
    requests = Requests(Decoder(weights, TAPS, MAX_LEN, SingleRank()), [NUM_TOKENS])
    requests.compute({0: NUM_TOKENS})
    return requests


@pytest.mark.one_in(3)
def test_each_value_of_a_spec_has_an_effect(checkpoint: Path) -> None:
    spec = replace(read_model(checkpoint), mtp=None)  # test_mtp.py has that layer
    requests = logits_of(checkpoint, spec)
    expected, _ = oracle(checkpoint, requests.tokens[0])

    def error(requests: Requests) -> float:
        return float((torch.cat(requests.logits[0]) - expected).abs().max())

    assert error(requests) < PARITY
    idle: dict[str, float] = {}
    for name, mutated in mutations(spec):
        if name in TOLD_TO_BACKENDS:
            assert mutated.stack_spec().features < spec.stack_spec().features, name
            continue
        try:
            found = error(logits_of(checkpoint, mutated))
        except (CheckpointError, ConfigError, RuntimeError):  # refused, or of shapes that do not multiply
            continue
        if found < NOTICED:
            idle[name] = found
    assert not idle, "these may be left out of the family's file, and no test of parity would fail"
