"""A causal language model inside an ST module: loaded or shared, changed, run, and saved."""

from __future__ import annotations

import contextlib
import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast

from sentence_transformers.base.modules import Transformer
from torch import Tensor, nn

from ..hub import compat
from ..lm import anatomy, backbone, gguf
from ..lm.attention import setup
from ..lm.attention.observers import Observer
from ..lm.run import Halt, PassChange, run
from ..lm.view import view
from ..text.layout import Layout
from .changes import AttendBothWays, BeforeFeedForward, Change, EarlyExit, combined, from_settings
from .checkpoints import SafeTransformer, backbone_of
from .checks import check_length, check_transformer_kwargs

_Change = TypeVar("_Change", bound=Change)


# The arguments of ``load`` that say where the files of a model are.
_WHERE = ("token", "cache_folder", "revision", "local_files_only")


class Checked(ABCMeta):
    """Classes whose modules are checked when they are whole, and not before."""

    if not TYPE_CHECKING:
        # To a type checker a class makes what its constructor says, which pyright would not look at beside this.
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            module = super().__call__(*args, **kwargs)
            module.check()
            return module

    @property
    def __signature__(cls) -> inspect.Signature:
        """What a class is called with, which ``__call__`` would hide."""
        whole = inspect.signature(cls.__init__)  # type: ignore[misc]
        return whole.replace(parameters=list(whole.parameters.values())[1:])


class LanguageModel(SafeTransformer, metaclass=Checked):
    """A causal language model that ends where it is told to, with what is changed while it reads.

    Args:
        model_name_or_path: A decoder-only model's path or Hub id, or those of a GGUF file (see
            :func:`st_reba.lm.gguf.as_directory`); or a loaded ST ``Transformer``, whose weights and tokenizer are then
            shared, not copied. What is set up here, such as how the backbone attends, is set on a view of it: the
            other stays as it is, and none of its settings is taken over.
        changes: What is changed while it reads: see :mod:`st_reba.modules.changes`.
        own_changes: What the method's own settings change. It is saved by these settings.
        bidirectional_layers: How many of the last layers attend to later tokens too; as :class:`AttendBothWays`.
        output_layer: After which layer to stop; as :class:`EarlyExit`. None: ``usual_output_layer``.
        usual_output_layer: The same where neither this nor ``changes`` says; below a model's first layer, that one.
        final_norm: Whether the states that are read go through the model's final norm.
        readout: ``"before_mlp"`` as :class:`BeforeFeedForward`; ``"layer"``: what the last layer gives.
        unfit_changes: Why the method does not go together with a change, in a sentence; None where it does.
        **transformer_kwargs: As for ST's ``Transformer``.

    Raises:
        ValueError: If the model is not causal, or its checkpoint lacks weights, or it cannot be changed so, or it
            cannot stop after ``output_layer``, or before its final norm.
    """

    #: The share of the layers that is run where nothing says after which to stop; None: all of them.
    SHARE: ClassVar[float | None] = None

    def __init__(
        self,
        model_name_or_path: str | Transformer,
        *,
        changes: Sequence[Change | Mapping[str, Any]],
        own_changes: Sequence[Change],
        bidirectional_layers: int,
        output_layer: int | None,
        usual_output_layer: int | None,
        final_norm: bool,
        readout: str,
        unfit_changes: Callable[[Change], str | None],
        transformer_kwargs: dict[str, Any],
    ) -> None:
        if type(bidirectional_layers) is not int or bidirectional_layers < 0:
            raise ValueError(
                f"bidirectional_layers={bidirectional_layers!r}: give the number of last layers that attend both ways, "
                "0 or more."
            )
        named = [*own_changes, *([AttendBothWays(bidirectional_layers)] if bidirectional_layers else [])]
        if readout == "before_mlp":
            named.append(BeforeFeedForward())
        if output_layer is not None:
            named.append(EarlyExit(output_layer))
        wanted = combined(type(self).__name__, named, changes, unfit_changes)
        check_transformer_kwargs(transformer_kwargs)
        if isinstance(model_name_or_path, Transformer):
            self._share(model_name_or_path, transformer_kwargs)
        else:
            path, transformer_kwargs = gguf.as_directory(cast(str, model_name_or_path), transformer_kwargs)
            if "subfolder" not in (transformer_kwargs.get("model_kwargs") or {}):
                path = backbone_of(path)
            super().__init__(path, **transformer_kwargs)
        compat.check_placement(self.model)
        if self.tokenizer is None:
            raise ValueError(f"{model_name_or_path} has no tokenizer: st_reba embeds text.")
        check_length(self.tokenizer.model_max_length, "the tokenizer's model_max_length")
        if hasattr(self.model.config, "use_cache"):
            self.model.config.use_cache = False
        # Of the whole model, of which the layers above the output layer are then not run.
        self._whole_depth = backbone.depth(self.model)
        leaving = self._exit(wanted, usual_output_layer)
        self.output_layer = None if leaving is None else leaving.output_layer
        if self.output_layer is not None:
            self.model = anatomy.shortened(self.model, self.output_layer)
        # Of layers that are left out, none is needed.
        self.check_weights()
        self.final_norm = final_norm
        if not final_norm:
            # Refused here where it is not found.
            anatomy.final_norm(self.model)
        setup.prepare(self.model)
        others = [change.on(self.model, self._whole_depth) for change in wanted if not isinstance(change, EarlyExit)]
        #: What is changed while it reads, what the class' own settings say included.
        self.changes: tuple[Change, ...] = (*([] if leaving is None else [leaving]), *others)
        kinds = (AttendBothWays, BeforeFeedForward, EarlyExit, *map(type, own_changes))
        #: Those of them that settings of the class' own say, by which they are saved.
        self.own_changes = tuple(change for change in self.changes if isinstance(change, kinds))
        self.readout = "layer"
        if any(isinstance(change, BeforeFeedForward) for change in self.changes):
            self.readout = "before_mlp"
        self.bidirectional_layers = sum(
            change.bidirectional_layers for change in self.changes if isinstance(change, AttendBothWays)
        )

    def check(self) -> None:
        """Called when the module is whole: refuse what its settings come to only together."""

    def _share(self, other: Transformer, kwargs: dict[str, Any]) -> None:
        if kwargs:
            raise ValueError(f"{sorted(kwargs)} cannot be set on a backbone that is already loaded: leave them out.")
        task = getattr(other, "transformer_task", "feature-extraction")
        if task != "feature-extraction":
            raise ValueError(
                f"transformer_task={task!r}: the loaded Transformer ends in a head, and st_reba reads hidden states. "
                'Load it with transformer_task="feature-extraction", or give the path of its model.'
            )
        nn.Module.__init__(self)
        compat.share(other, self)
        if isinstance(other, SafeTransformer):
            self.lacking, self.checkpoint = other.lacking, other.checkpoint
        self.can_flatten_inputs = False
        # What is set here, and by what follows, is not the other's to bear.
        self.model = view(other.model)

    def _exit(self, changes: Sequence[Change], usual: int | None) -> EarlyExit | None:
        """Where the model ends, if not at its last layer."""
        depth = self._whole_depth
        for change in changes:
            if isinstance(change, EarlyExit):
                return change.on(self.model, depth)
        if usual is not None:
            return EarlyExit(max(usual, -depth)).on(self.model, depth)
        return None if self.SHARE is None else EarlyExit(max(1, round(self.SHARE * depth)))

    @property
    def reuses_states(self) -> bool:
        """Whether the states of what stands before a token are the same whatever follows, so that they can be kept."""
        return not any(change.looks_ahead or change.replaces == "masks" for change in self.changes)

    def change(self, kind: type[_Change]) -> _Change:
        """The change of this kind, which the module makes, with the settings that it has on this model."""
        return next(change for change in self.changes if isinstance(change, kind))

    def layer(self, index: int) -> nn.Module:
        """A layer of the backbone: it is looked for by its path, as an adapter may have taken the place of a module."""
        return self.model.get_submodule(anatomy.layer_paths(self.model)[index])

    # Padding

    @property
    def unpad_inputs(self) -> bool:
        """False: the texts of a batch are padded. What is given or was saved besides is read and ignored."""
        return False

    @unpad_inputs.setter
    def unpad_inputs(self, value: bool | None) -> None:
        if value not in (None, True, False):
            raise ValueError(f"unpad_inputs={value!r}: use True, False or None.")
        self.can_flatten_inputs = False

    # A pass

    def read_companion(self, change: Change, layout: Layout, **kwargs: Any) -> Tensor:
        """(B, ...): what a change sees of B texts in the layout of its companion."""
        observer = change.observer(self.model, layout)
        with contextlib.suppress(Halt):
            self.run(layout, change=[observer.as_change()], is_companion=True, **kwargs)
        return observer.states()[0]

    def run(
        self,
        layout: Layout,
        *,
        inputs: Callable[[], Mapping[str, Any]] | None = None,
        change: Sequence[PassChange] = (),
        observe: Observer | None = None,
        is_companion: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        """One pass of the language model, the one way to run it: see :func:`st_reba.lm.run.run`.

        Args:
            layout: B texts.
            inputs: Makes what the backbone is given, in the pass, in place of the layout's ``input_ids``.
            change: What is changed besides the module's own ``changes``.
            observe: Looks on at attention.
            is_companion: Whether the layout is that of a change's companion: changes that have one are then not made.
            **kwargs: For the backbone's forward.

        Returns:
            Last hidden states (B, N, D).

        Raises:
            ValueError: If states are changed or anything is looked at, and the backbone is trained with gradient
                checkpointing.
        """
        # A word of ST's, for modules that are one for queries and another for documents: no backbone knows it.
        kwargs.pop("task", None)
        made = [own.effect(self.model, layout) for own in self.changes if own.companion is None or not is_companion]
        return run(
            self.model,
            layout,
            changes=[*made, *change],
            observe=observe,
            hands_out_maps=not anatomy.anatomy_of(self.model).calls_our_attention,
            inputs=inputs,
            reader=self._reader,
            **kwargs,
        )

    @property
    def _reader(self) -> str:
        """The class, and what is changed, for a refusal."""
        changes = [str(change) for change in self.changes if not isinstance(change, EarlyExit)]
        return " with ".join([type(self).__name__, *([", ".join(changes)] if changes else [])])

    # On disk

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", *args: Any, **kwargs: Any) -> Self:
        """Load a saved module, as ST's ``Transformer.load`` does.

        Args:
            model_name_or_path: A directory or a Hub id.
            subfolder: Where in it the module lies: ``path`` in its modules.json. May be left out for a directory.
            *args: As for ST's ``Transformer.load``.
            **kwargs: As for ST's ``Transformer.load``.

        Raises:
            ValueError: If ``subfolder`` leads out of the model, a setting is out of range or none that a saved module
                has, a change is none that is registered, or weights are missing.
        """
        module = super().load(model_name_or_path, subfolder, *args, **kwargs)
        name = model_name_or_path if subfolder else backbone_of(model_name_or_path)
        where = {name: kwargs[name] for name in _WHERE if name in kwargs}
        find = partial(cls.load_file_path, name, subfolder=subfolder, **where)
        module.changes = tuple(change.loaded(find, cls.__name__) for change in module.changes)
        return module

    @classmethod
    def load_config(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The settings that were saved. What version 0.1 did not write is as it was then."""
        config = super().load_config(*args, **kwargs)
        saved = config.get("changes", [])
        if not isinstance(saved, list) or not all(isinstance(settings, dict) for settings in saved):
            raise ValueError(f"changes is {saved!r} in the saved settings: it is a list of objects, each with a key.")
        if saved:
            # Here, because nothing is loaded yet.
            config["changes"] = [from_settings(settings) for settings in saved]
        return config

    def get_config_dict(self) -> dict[str, Any]:
        config = super().get_config_dict()
        config = {key: value for key, value in config.items() if key not in ("changes", "unpad_inputs")}
        if config.get("readout") == "layer":
            del config["readout"]
        # What settings of the class' own say is among the changes, and not saved twice.
        others = [change.settings() for change in self.changes if change not in self.own_changes]
        return {**config, "changes": others} if others else config

    def save(self, output_path: str, *args: Any, safe_serialization: bool = True, **kwargs: Any) -> None:
        """Save backbone, tokenizer and settings, and note in ST's own configuration that st_reba is needed to load.

        Raises:
            ValueError: If the backbone was quantised in a way that it cannot be saved in.
        """
        backbone.check_it_can_be_saved(self.model)
        super().save(output_path, *args, safe_serialization=safe_serialization, **kwargs)
        for change in self.changes:
            change.save(Path(output_path))
