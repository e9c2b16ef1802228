"""Controls: the base tuned on the sidecar's rows, so that slots are not praised for the form of answers.

``tuned`` was tuned and answers with documents in full; ``tuned_none`` was tuned and answers without any.
"""

import copy

from transformers import PreTrainedModel

from c2kv_core import prefill
from c2kv_core.base_digest import base_digest
from c2kv_core.errors import ConfigError
from c2kv_core.models import model_directory
from pipelines.control import Control, Documents
from pipelines.eval.case import Case
from pipelines.eval.methods.method import MethodContext, Setup


class Tuned:
    """Full compute by the tuned base."""

    def __init__(self, setup: Setup) -> None:
        self._model = _tuned_model(setup, setup.config.tuned, "tuned", "full")
        self._prefix_ids = setup.compressor.renderer.prefix_ids(setup.config.system)

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        context = prefill(self._model, [*self._prefix_ids, *case.source_ids])
        return [MethodContext(ratio=None, context=context, entries=case.source_tokens, model=self._model)]


class TunedWithoutDocuments:
    """No documents, by the base tuned without any."""

    def __init__(self, setup: Setup) -> None:
        self._model = _tuned_model(setup, setup.config.tuned_none, "tuned_none", "none")
        prefix_ids = setup.compressor.renderer.prefix_ids(setup.config.system)
        self._prefix = prefill(self._model, prefix_ids) if prefix_ids else None

    def contexts(self, case: Case) -> list[MethodContext]:
        """See ``Method``."""
        return [MethodContext(ratio=None, context=self._prefix, entries=0, model=self._model)]


def _tuned_model(setup: Setup, directory: str | None, name: str, documents: Documents) -> PreTrainedModel:
    if directory is None:
        raise ConfigError(
            f"the method {name} needs a control: {name}=DIR, made by `c2kv train control={documents}`"
        )
    control = Control.load(directory)
    if control.documents != documents:
        raise ConfigError(
            f"{name} expects a control tuned with documents {documents}, the one in {directory} had {control.documents}"
        )
    tuned_from, weights = control.sidecar.header.base_digest, base_digest(model_directory(setup.config.model))
    if tuned_from != weights:
        raise ConfigError(
            f"{directory} was tuned from base weights {tuned_from[:12]}, those of the model are {weights[:12]}"
        )
    model = copy.deepcopy(setup.compressor.model)
    control.merge_into(model)
    return model
