"""Building a cell: the engine with its target, verifier and proposers, in one process or over channels."""

from collections.abc import Mapping
from functools import partial
from typing import get_args

import torch

from specserve.service.engine import Engine, EngineConfig
from specserve.service.errors import BadRequestError
from specserve.service.grammar import Grammars
from specserve.service.inline import DirectProposerPort, InlineProposerPort, InlineRoundPort
from specserve.service.int8_linear import Int8Linear
from specserve.service.models import (
    LoadedModel,
    ModelShape,
    has_tokenizer,
    head_of,
    load_model,
    load_tokenizer,
    read_shape,
    resolve_dtype,
)
from specserve.service.packed_linear import Head, PackedLinear
from specserve.service.plugins import PluginPort, load_plugin
from specserve.service.ports import Proposer, ProposerPort, RoundPort
from specserve.service.proposers.attached import attach
from specserve.service.proposers.draft_model import DraftModelProposer
from specserve.service.proposers.prediction import PredictionProposer
from specserve.service.proposers.prompt_lookup import PromptLookupProposer
from specserve.service.proposers.self_draft import SelfDraftProposer, check_layers
from specserve.service.proposers.suffix import SuffixLimits, SuffixProposer
from specserve.service.target import Target
from specserve.service.torch_thread import torch_thread
from specserve.service.verifier import Verifier
from specserve.service.vocabularies import shared_vocabulary
from specserve.service.warmup import warm_up

from .api.backend import AnswerStyle
from .backend import EngineBackend
from .planning import PolicyPlanner
from .settings import ProposerName, ServiceSettings, load_policy


def inline_backend(settings: ServiceSettings, planner: PolicyPlanner | None = None) -> EngineBackend:
    """Return a backend whose every part lives in this process; its engine is not started yet."""
    executor = torch_thread(settings.num_threads)
    shape = read_shape(settings.model_source)
    grammars = model_grammars(settings, shape)
    target, verifier, attached, draft = executor.submit(_models, settings, grammars).result()
    ports = local_proposer_ports(settings)
    if draft is not None:
        ports[draft.name] = InlineProposerPort(draft, executor)
    ports |= {name: InlineProposerPort(one, executor, needs_pages=True) for name, one in attached.items()}
    round_port = InlineRoundPort(target, verifier, executor)
    planner = planner or PolicyPlanner(load_policy(settings.policy))
    return cell_backend(settings, engine_config(settings, shape), round_port, ports, planner, grammars)


def _models(
    settings: ServiceSettings, grammars: Grammars
) -> tuple[Target, Verifier, dict[str, Proposer], DraftModelProposer | None]:
    """Return what computes; the modules they were made of are freed."""
    dtype = resolve_dtype(settings.dtype)
    model = load_model(settings.model_source, dtype, settings.device)
    head = head_of(model)
    target, attached = target_and_attached(settings, model, head)
    wants_draft = "draft" in settings.usable_proposers
    draft = draft_proposer(settings, model.shape.vocab_size, dtype) if wants_draft else None
    return target, Verifier(model, grammars, head), attached, draft


def target_and_attached(
    settings: ServiceSettings, model: LoadedModel, head: Head | None = None
) -> tuple[Target, dict[str, Proposer]]:
    """Return the target and the proposers that live beside it, because they draft from what it computes.

    Some need the model's head: `head` if it is laid out in this process already.
    """
    skips = settings.self_drafts(model.config.num_hidden_layers)
    folders = settings.attached_folders
    if not skips and not folders:
        return Target(model, settings.num_pages, settings.page_tokens), {}
    head = head or head_of(model)
    attached, features = attach(
        folders, model, head, settings.num_pages, settings.page_tokens, settings.head_drafts == "tree"
    )
    target = Target(model, settings.num_pages, settings.page_tokens, features)
    if skips:
        check_layers(model)
    for name, skip in skips.items():
        attached[name] = SelfDraftProposer(name, target, head, skip, settings.page_tokens, model.shape.max_positions)
    return target, attached


def model_grammars(settings: ServiceSettings, shape: ModelShape) -> Grammars:
    """Return the grammars of the model's own tokenizer."""
    return Grammars(load_tokenizer(settings.model_source), shape.vocab_size, shape.eos_token_ids)


def local_proposer_ports(settings: ServiceSettings) -> dict[str, ProposerPort]:
    """Return ports to the proposers in the engine's own process: those without a model, and users' own."""
    suffix = SuffixProposer(SuffixLimits(chain=settings.suffix_drafts == "chain"))
    built: tuple[Proposer, ...] = (PredictionProposer(), PromptLookupProposer(), suffix)
    ports: dict[str, ProposerPort] = {
        one.name: DirectProposerPort(one) for one in built if one.name in settings.usable_proposers
    }
    for path in settings.plugins:
        plugin = load_plugin(path)
        if plugin.name in ports or plugin.name in get_args(ProposerName):
            raise BadRequestError(f"{path} is called {plugin.name!r}, as another proposer is", "proposers")
        ports[plugin.name] = PluginPort(plugin, trusted=path in settings.trusted_proposers)
    return ports


def draft_proposer(settings: ServiceSettings, vocab_size: int, dtype: torch.dtype) -> DraftModelProposer:
    """Return the draft-model proposer, with as many KV pages as the target has.

    Its tokenizer may be another than the target's; a draft model without one is taken to have the target's.
    """
    assert settings.draft_source is not None
    draft = load_model(settings.draft_source, dtype, settings.device)
    vocabulary = None
    if has_tokenizer(settings.draft_source):
        target_tokenizer, own = load_tokenizer(settings.model_source), load_tokenizer(settings.draft_source)
        vocabulary = shared_vocabulary(target_tokenizer, own, vocab_size, draft.shape.vocab_size)
    linear = Int8Linear if settings.draft_quantization == "int8" else PackedLinear
    return DraftModelProposer(draft, vocab_size, settings.num_pages, settings.page_tokens, vocabulary, linear)


def engine_config(settings: ServiceSettings, shape: ModelShape) -> EngineConfig:
    """Return the engine's limits for a model of this shape under `settings`."""
    max_len = min(settings.max_model_len or shape.max_positions, shape.max_positions)
    return EngineConfig(
        max_model_len=max_len,
        vocab_size=shape.vocab_size,
        eos_token_ids=shape.eos_token_ids,
        num_pages=settings.num_pages,
        page_tokens=settings.page_tokens,
        max_running=settings.max_running,
        prefill_tokens=settings.prefill_tokens,
        prefill_tokens_busy=settings.prefill_tokens_busy,
        prefix_caching=settings.prefix_caching,
    )


def cell_backend(
    settings: ServiceSettings,
    config: EngineConfig,
    round_port: RoundPort,
    ports: Mapping[str, ProposerPort],
    planner: PolicyPlanner,
    grammars: Grammars,
) -> EngineBackend:
    """Return the backend of a cell made of these parts."""
    tokenizer = grammars.tokenizer
    engine = Engine(round_port, ports, planner, tokenizer, config, grammars)
    warm = partial(warm_up, round_port, ports, planner, config)
    dtype = str(resolve_dtype(settings.dtype)).removeprefix("torch.")
    style = AnswerStyle(settings.keep_alive_s, settings.count_rejected_predictions)
    about = (dtype, settings.placement)
    return EngineBackend(engine, settings.model_id, tokenizer, warm, style, *about, shadow=lambda: planner.shadow)
