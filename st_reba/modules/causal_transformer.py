"""The classical embedding: a causal language model read as it is."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any, Self, cast

from torch import Tensor

from ..hub.saved_files import check_inside, is_no_sink
from ..lm import backbone
from ..text.layout import Layout
from .causal_module import CausalModule
from .checkpoints import ON_THE_HUB, backbone_of


class CausalTransformer(CausalModule):
    r"""Word i is the last hidden state :math:`v_i` of token i (Table 1 of the ReBA paper, "Classical").

    What ST's own ``Transformer`` does, for causal models, with what the other modules share: right padding whatever the
    tokenizer says, prompts that are not pooled, zero vectors for empty texts.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or a loaded ``Transformer`` to share.
        template: Text with one ``{text}``, for prompts that surround the input; or a name in
            :data:`st_reba.TEMPLATES`. A name brings how its authors read it, in all that follows here and in
            ``output_layer``, ``final_norm`` and ``normalize_text`` of :class:`CausalModule`; a text brings nothing.
        pool_over: ``"text"``, ``"all"`` or ``"whole"``; see :class:`CausalModule`. None: ``"text"``, unless the
            template's name says otherwise: the prompts are read to their end.
        rows: ``"all"`` hands on every token, (B, n, D). ``"last"`` computes and hands on the last alone, (B, 1, D): the
            cheap way when last pooling is all that is wanted. None: ``"all"``, unless the template's name says
            otherwise: of the PromptEOL family, the last is read.
        **settings: All else as for :class:`CausalModule` and ST's ``Transformer``.

    Raises:
        ValueError: If the template has another number of slots, or the model is not causal.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    config_keys = [*CausalModule.config_keys, "template", "rows"]
    method = "Classical"
    equation = r"e_i = v_i, \quad i = 1, \dots, n"

    @classmethod
    def load(cls, model_name_or_path: str | PathLike[str], subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module; what 0.8 saved with the change ``no-sink`` alone as :class:`NoSinkModule`."""
        if cls is CausalTransformer:
            from .no_sink import NoSinkModule

            where = {name: kwargs[name] for name in ON_THE_HUB if name in kwargs}
            place = fspath(model_name_or_path) if check_inside(subfolder) else backbone_of(model_name_or_path)
            if is_no_sink(cls._saved(place, subfolder, **where)):
                return cast(Self, NoSinkModule.load(model_name_or_path, subfolder, *args, **kwargs))
        return super().load(model_name_or_path, subfolder, *args, **kwargs)


class InputEmbeddings(CausalTransformer):
    r"""Word i is the input embedding of token i: no context at all.

    The control without which a score means little: on small decoders the mean of the input embeddings beats many a
    contextual recipe.
    """

    __module__ = "st_reba.modules"  # what sentence-transformers writes into modules.json

    method = "Bag of input embeddings"
    equation = r"e_i = E[w_i], \quad i = 1, \dots, n"
    cost = "One look-up per token: next to nothing beside the classical embedding."

    @property
    def reads_behind_prefixes(self) -> bool:
        """There is no pass, and so nothing to be spared."""
        return False

    def run(self, layout: Layout, **kwargs: Any) -> Tensor:
        input_ids = layout.input_ids.to(backbone.device(self.model), non_blocking=True)
        states: Tensor = self.model.get_input_embeddings()(input_ids)
        return states
